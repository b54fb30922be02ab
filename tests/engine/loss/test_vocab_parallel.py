"""The loss over ranks that hold slices of the vocabulary, against the loss of one rank that holds it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.operations import Operations
from testkit.ranks import Pools
from torch import Tensor

from benchmarks.plain_loss import cross_entropy_plain
from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.loss.fused import VocabularyRanks, linear_cross_entropy
from engine.parallel.tensor import vocabulary_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64 sums of a few hundred terms in another order
ROWS, VOCAB, SIZE = 36, 24, 5
SCALE = -0.37  # of the loss, before backward

Parts = tuple[Tensor, Tensor, Tensor]  # loss, gradients of hidden and weight


def make_inputs(dtype: torch.dtype, spread: float = 1.0, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [ROWS, SIZE], weight [VOCAB, SIZE] and labels [ROWS] of all ranks."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(ROWS, SIZE, dtype=torch.float64, generator=generator) * spread
    weight = torch.randn(VOCAB, SIZE, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < ignored] = IGNORE_INDEX
    return hidden.to(dtype), weight.to(dtype), labels


def world() -> VocabularyRanks:
    assert dist.group.WORLD is not None
    return vocabulary_ranks(dist.group.WORLD)


def my_loss(options: LossConfig, dtype: torch.dtype, **inputs: float) -> Parts:
    """This rank's loss sum, and its gradients of its rows and its slice."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels = make_inputs(dtype, **inputs)
    own_hidden = hidden.chunk(ranks)[rank].clone().requires_grad_()
    own_weight = weight.chunk(ranks)[rank].clone().requires_grad_()
    own_labels = labels.chunk(ranks)[rank]
    loss = linear_cross_entropy(own_hidden, own_weight, own_labels, options=options, ranks=world())
    (loss * SCALE).backward()
    return loss.detach(), own_hidden.grad, own_weight.grad


def whole_loss(options: LossConfig, dtype: torch.dtype, **inputs: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same of one rank, by the plain loss in float64 over inputs rounded to `dtype`."""
    hidden, weight, labels = make_inputs(dtype, **inputs)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = cross_entropy_plain(hidden, weight, labels, options=options)
    return loss.detach(), *torch.autograd.grad(loss * SCALE, (hidden, weight))


def joined(results: list[Parts]) -> tuple[Tensor, Tensor, Tensor]:
    """The ranks' parts as one rank's result."""
    losses, hidden, weight = zip(*results, strict=True)
    return torch.stack(losses).sum(), torch.cat(hidden), torch.cat(weight)


@pytest.mark.parametrize(
    ("world_size", "z_loss", "chunk_tokens"),
    [(1, 0.03, 8), (2, 0.0, 1), (2, 0.03, 1000), (4, 0.03, 1), (4, 0.0, 8)],
)
def test_slices_give_the_loss_and_gradients_of_the_whole(
    ranks: Pools, world_size: int, z_loss: float, chunk_tokens: int
) -> None:
    options = LossConfig(chunk_tokens=chunk_tokens, z_loss=z_loss)
    found = joined(ranks(world_size).run(my_loss, options, torch.float64))
    for ours, theirs in zip(found, whole_loss(options, torch.float64), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_each_rank_counts_the_loss_of_its_own_rows(ranks: Pools) -> None:
    hidden, weight, labels = make_inputs(torch.float64)
    for rank, (loss, _, _) in enumerate(ranks(2).run(my_loss, LossConfig(chunk_tokens=8), torch.float64)):
        own = (hidden.chunk(2)[rank], weight, labels.chunk(2)[rank])
        torch.testing.assert_close(loss, cross_entropy_plain(*own, options=LossConfig()), **EXACT)


@pytest.mark.parametrize("inputs", [{"spread": 300.0}, {"ignored": 1.1}], ids=["large logits", "no label counts"])
def test_extremes_stay_exact(ranks: Pools, inputs: dict[str, float]) -> None:
    options = LossConfig(chunk_tokens=8)
    expected = whole_loss(options, torch.float64, **inputs)
    for ours, theirs in zip(joined(ranks(2).run(my_loss, options, torch.float64, **inputs)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def test_bfloat16_errors_are_those_of_one_rank(ranks: Pools) -> None:
    options = LossConfig(chunk_tokens=16)
    exact = whole_loss(options, torch.bfloat16)
    one, four = (joined(ranks(size).run(my_loss, options, torch.bfloat16)) for size in (1, 4))
    assert (four[0].dtype, four[1].dtype, four[2].dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    # 1.5: the gradient of hidden is the sum of four rounded parts instead of one.
    for found, alone, reference in zip(four, one, exact, strict=True):
        assert relative_error(found, reference) <= 1.5 * relative_error(alone, reference) + 1e-6


class Recorder:
    """Counts collectives and remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.largest = 0

    def see(self, func: Any, args: Any, out: Any) -> None:
        if func.namespace == "c10d":
            self.collectives.append(str(func.overloadpacket))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())


def recorded_loss(options: LossConfig) -> tuple[list[str], int]:
    recorder = Recorder()
    with Operations(recorder.see):
        my_loss(options, torch.float64)
    return recorder.collectives, recorder.largest


def test_no_rank_holds_logits_beyond_a_chunk_of_its_slice(ranks: Pools) -> None:
    gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
    chunk = [gather, gather, scatter]  # rows; maximum, sum and label's logit; gradient of the rows
    for collectives, largest in ranks(2).run(recorded_loss, LossConfig(chunk_tokens=12)):
        assert collectives == [gather, *chunk * 3]  # labels once; nothing in backward
        assert largest == max(12 * VOCAB // 2, ROWS * SIZE)  # the latter: this test's own inputs


def loss_of_a_label_beyond_the_vocabulary() -> bool:
    hidden, weight, labels = (part.chunk(2)[dist.get_rank()] for part in make_inputs(torch.float64))
    labels[0] = VOCAB
    return bool(linear_cross_entropy(hidden, weight, labels, options=LossConfig(), ranks=world()).isfinite())


def test_a_label_that_no_rank_has_is_no_finite_loss(ranks: Pools) -> None:
    assert ranks(2).run(loss_of_a_label_beyond_the_vocabulary) == [False, False]
