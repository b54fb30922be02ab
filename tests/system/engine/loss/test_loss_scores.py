"""Scores of single labels: against whole rows of logits in float64, by one rank and by those that hold slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from testkit.loss_cases import Inputs, part_of, world
from testkit.ranks import Pools
from torch import Tensor

from engine.loss.head import row_scores

ABSOLUTE = 1e-4  # logits of up to some tens in fp32, summed in another order


def case(seed: int, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """hidden [rows, 16], weight [V, 16], labels: two of three the best id, the others any, the last one uncounted."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 16, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, 16, generator=generator).to(dtype)
    labels = (hidden.double() @ weight.double().t()).argmax(dim=1)
    labels[::3] = torch.randint(0, vocabulary, (len(labels[::3]),), generator=generator)
    labels[-1] = -100
    return hidden, weight, labels


def expected(hidden: Tensor, weight: Tensor, labels: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """By numpy, from whole rows of logits in float64."""
    logits = hidden.double().numpy() @ weight.double().numpy().T
    top = logits.max(axis=1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    ids = labels.numpy()
    nats = lse - logits[np.arange(len(ids)), np.maximum(ids, 0)]
    return np.where((ids == -100)[:, None], 0.0, np.stack([nats, logits.argmax(axis=1) == ids], axis=1))


# Of equal logits the smallest id wins as in greedy decoding: a model without an opinion is not right whatever the
# answer is.
UNDECIDED = (torch.zeros(24, 8), torch.zeros(12, 8), torch.arange(24) % 12)
CASES = {
    torch.float32: [case(seed, 1 + seed % 20, 1 + 31 * seed % 300) for seed in range(40)],
    torch.bfloat16: [case(seed, 1 + seed % 20, 1 + 31 * seed % 300, torch.bfloat16) for seed in range(40)],
    "many blocks": [case(1, 12, 20_000)],
    "undecided": [UNDECIDED],
}


@pytest.mark.parametrize("kind", CASES, ids=str)
def test_scores_are_those_of_whole_rows(kind: object) -> None:
    for inputs in CASES[kind]:  # type: ignore[index]
        np.testing.assert_allclose(row_scores(*inputs).numpy(), expected(*inputs), atol=ABSOLUTE)


def scores_of_slices(cases: Sequence[Inputs]) -> list[Tensor]:
    return [row_scores(*(x.detach() for x in part_of(inputs)), ranks=world()) for inputs in cases]


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_join_to_the_whole(ranks: Pools, slices: int) -> None:
    cases = [*(case(seed, 12, 30 * slices) for seed in range(15)), UNDECIDED]
    for inputs, parts in zip(cases, zip(*ranks(slices).run(scores_of_slices, cases), strict=True), strict=True):
        np.testing.assert_allclose(torch.cat(parts).numpy(), expected(*inputs), atol=ABSOLUTE)
