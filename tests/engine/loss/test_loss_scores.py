"""Scores of single labels: against whole rows of logits in float64, and joined from slices of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.loss.scores import join_scores, row_scores, slice_scores

quick = settings(deadline=None, max_examples=40)
ABSOLUTE = 1e-4  # logits of up to some tens in fp32, summed in another order


def case(seed: int, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 20), vocabulary=st.integers(1, 300))
@quick
def test_scores_are_those_of_whole_rows(dtype: torch.dtype, seed: int, rows: int, vocabulary: int) -> None:
    arguments = case(seed, rows, vocabulary, dtype)
    np.testing.assert_allclose(row_scores(*arguments).numpy(), expected(*arguments), atol=ABSOLUTE)


def test_a_vocabulary_of_many_blocks_is_one() -> None:
    arguments = case(1, 12, 20_000)
    np.testing.assert_allclose(row_scores(*arguments).numpy(), expected(*arguments), atol=ABSOLUTE)


@given(seed=st.integers(0, 2**31), slices=st.sampled_from([2, 3, 5]))
@quick
def test_slices_join_to_the_whole(seed: int, slices: int) -> None:
    hidden, weight, labels = case(seed, 9, 30 * slices)
    parts = [
        slice_scores(hidden, weight[first : first + 30], labels, first_id=first) for first in range(0, 30 * slices, 30)
    ]
    joined = join_scores(torch.stack(parts), labels)
    np.testing.assert_allclose(joined.numpy(), expected(hidden, weight, labels), atol=ABSOLUTE)


@pytest.mark.parametrize("label", range(4))
def test_of_equal_logits_the_smallest_id_wins_as_in_greedy_decoding(label: int) -> None:
    """A model without an opinion is not right whatever the answer is."""
    hidden, weight = torch.zeros(1, 8), torch.zeros(4, 8)
    labels = torch.tensor([label])
    assert row_scores(hidden, weight, labels)[0, 1].item() == (label == 0)
    parts = torch.stack([slice_scores(hidden, weight[first : first + 2], labels, first_id=first) for first in (0, 2)])
    assert join_scores(parts, labels)[0, 1].item() == (label == 0)
