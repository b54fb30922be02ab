"""The loss over ranks that hold slices of the vocabulary, against the loss of one rank that holds it whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.loss_cases import (
    Inputs,
    assert_exact,
    in_dtype,
    make_inputs,
    part_of,
    relative_error,
    value_and_gradients,
    world,
)
from testkit.operations import Operations
from testkit.ranks import Pools
from torch import Tensor

from benchmarks.plain_loss import cross_entropy_plain
from engine.config.settings import LossConfig
from engine.loss.fused import linear_cross_entropy

ROWS, VOCAB, SIZE = 36, 24, 5
SCALE = -0.37  # of the loss, before backward


def my_loss(inputs: Inputs, **options: Any) -> list[Tensor]:
    """This rank's loss sum, and its gradients of its rows and its slice."""
    return value_and_gradients(partial(linear_cross_entropy, ranks=world()), part_of(inputs), SCALE, **options)


def joined(results: list[list[Tensor]]) -> list[Tensor]:
    """The ranks' parts as one rank's result."""
    losses, hidden, weight = zip(*results, strict=True)
    return [torch.stack(losses).sum(), torch.cat(hidden), torch.cat(weight)]


@pytest.mark.parametrize(
    ("world_size", "z_loss", "chunk_tokens", "kind"),
    [
        (1, 0.03, 8, {}),
        (2, 0.0, 1, {}),
        (2, 0.03, 1000, {}),
        (4, 0.03, 1, {}),
        (4, 0.0, 8, {}),
        (2, 0.0, 8, {"spread": 300.0}),
        (2, 0.0, 8, {"ignored": 1.1}),
    ],
)
def test_vocabulary_slices_give_the_loss_of_the_whole(
    ranks: Pools, world_size: int, z_loss: float, chunk_tokens: int, kind: dict[str, float]
) -> None:
    inputs = make_inputs(ROWS, VOCAB, SIZE, **kind)
    found = ranks(world_size).run(my_loss, inputs, z_loss=z_loss, chunk_tokens=chunk_tokens)
    assert_exact(joined(found), value_and_gradients(cross_entropy_plain, inputs, SCALE, z_loss=z_loss))
    hidden, weight, labels = inputs
    for (loss, *_), rows, own in zip(found, hidden.chunk(world_size), labels.chunk(world_size), strict=True):
        assert_exact([loss], [cross_entropy_plain(rows, weight, own, options=LossConfig(z_loss=z_loss)).detach()])


def test_bfloat16_errors_are_those_of_one_rank(ranks: Pools) -> None:
    inputs = in_dtype(make_inputs(ROWS, VOCAB, SIZE), torch.bfloat16, torch.bfloat16)
    exact = value_and_gradients(cross_entropy_plain, in_dtype(inputs, torch.float64, torch.float64), SCALE)
    one, four = (joined(ranks(size).run(my_loss, inputs, chunk_tokens=16)) for size in (1, 4))
    assert [x.dtype for x in four] == [torch.float32, torch.bfloat16, torch.bfloat16]
    # 1.5: the gradient of hidden is the sum of four rounded parts instead of one.
    for found, alone, reference in zip(four, one, exact, strict=True):
        assert relative_error(found, reference) <= 1.5 * relative_error(alone, reference) + 1e-6


def recorded_loss() -> tuple[list[str], int]:
    """(collectives, elements of the largest tensor that any operation made)."""
    collectives: list[str] = []
    sizes: list[int] = []

    def see(func: Any, args: Any, out: Any) -> None:
        if func.namespace == "c10d":
            collectives.append(str(func.overloadpacket))
        sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))

    inputs = make_inputs(ROWS, VOCAB, SIZE)
    with Operations(see):
        my_loss(inputs, chunk_tokens=12)
    return collectives, max(sizes)


def test_no_rank_holds_logits_beyond_a_chunk_of_its_slice(ranks: Pools) -> None:
    gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
    chunk = [gather, gather, scatter]  # rows; maximum, sum and label's logit; gradient of the rows
    for collectives, largest in ranks(2).run(recorded_loss):
        assert collectives == [gather, *chunk * 3]  # labels once; nothing in backward
        assert largest == max(12 * VOCAB // 2, ROWS * SIZE)  # the latter: this test's own inputs


def loss_of_a_label_beyond_the_vocabulary() -> bool:
    hidden, weight, labels = part_of(make_inputs(ROWS, VOCAB, SIZE))
    labels[0] = VOCAB + dist.get_rank()
    return bool(linear_cross_entropy(hidden, weight, labels, options=LossConfig(), ranks=world()).isfinite())


def test_a_label_that_no_rank_has_is_no_finite_loss(ranks: Pools) -> None:
    assert ranks(2).run(loss_of_a_label_beyond_the_vocabulary) == [False, False]
