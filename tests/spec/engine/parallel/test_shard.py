"""One rank's part of a batch: every position once, labels with their tokens, padding that does not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.data.sampler import IGNORE_INDEX
from engine.distributed.mesh import RowPart
from engine.parallel.shard import LocalBatch, shard_batch
from engine.planning.visibility.layout import build_layout

CPU = torch.device("cpu")


def parts_of(tokens: np.ndarray, labels: np.ndarray, layout_name: str, padded: int, size: int) -> list[LocalBatch]:
    layout = build_layout(layout_name, padded, size)  # type: ignore[arg-type]
    return [shard_batch(tokens, labels, layout=layout, cp_rank=rank, device=CPU) for rank in range(size)]


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
def test_a_layout_permutes_all_fields_alike(layout_name: str) -> None:
    tokens = np.arange(10, dtype=np.int64)[None].repeat(2, axis=0)
    parts = parts_of(tokens, tokens + 1, layout_name, padded=12, size=3)
    for part in parts:
        inside = part.positions < 10
        for row in range(2):
            assert torch.equal(part.tokens[row][inside], part.positions[inside])
            assert torch.equal(part.labels[row][inside], part.positions[inside] + 1)
    assert sorted(torch.cat([part.positions for part in parts]).tolist()) == list(range(12))


def test_padding_has_no_label() -> None:
    tokens = np.ones((1, 5), dtype=np.int64)
    parts = parts_of(tokens, tokens, "zigzag", padded=8, size=2)
    counts = [int((part.labels != IGNORE_INDEX).sum()) for part in parts]
    assert counts == [2, 3]  # rank 0 holds positions 0 1 | 6 7, rank 1 holds 2 3 | 4 5
    assert parts[0].tokens.tolist() == [[1, 1, 0, 0]]


def test_tensor_parallel_ranks_divide_labels_only() -> None:
    tokens = np.arange(8, dtype=np.int64)[None].repeat(2, axis=0)
    layout = build_layout("zigzag", 8, 2)  # rank 0 holds positions 0 1 | 6 7
    place = {"layout": layout, "cp_rank": 0, "device": CPU}
    parts = [shard_batch(tokens, tokens + 1, **place, label_part=RowPart(i, 2)) for i in range(2)]  # type: ignore[arg-type]
    assert [part.labels.tolist() for part in parts] == [[[1, 2]] * 2, [[7, 8]] * 2]
    assert all(part.tokens.tolist() == [[0, 1, 6, 7]] * 2 for part in parts)
    assert all(part.positions.tolist() == [0, 1, 6, 7] for part in parts)


def test_a_batch_longer_than_the_layout_is_refused() -> None:
    tokens = np.zeros((1, 9), dtype=np.int64)
    with pytest.raises(ValueError, match="do not fit a layout of 8"):
        parts_of(tokens, tokens, "zigzag", padded=8, size=2)
    with pytest.raises(ValueError, match="10 rows cannot be divided among 4 ranks"):
        RowPart(0, 4).of(10)
