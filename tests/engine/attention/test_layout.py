"""Layouts cover every position once, in ascending local order, balanced as promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.layout import Segment, build_layout
from engine.errors import ConfigError

NAMES = st.sampled_from(["contiguous", "zigzag", "striped"])


@given(NAMES, st.integers(1, 200), st.integers(1, 16))
def test_every_position_lies_on_exactly_one_rank(name: str, seq_len: int, size: int) -> None:
    layout = build_layout(name, seq_len, size)
    positions = [layout.positions(rank) for rank in range(size)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(seq_len))
    assert [len(p) for p in positions] == [layout.rows(rank) for rank in range(size)]


@given(NAMES, st.integers(1, 200), st.integers(1, 16))
def test_local_order_ascends(name: str, seq_len: int, size: int) -> None:
    layout = build_layout(name, seq_len, size)
    assert all((np.diff(layout.positions(rank)) > 0).all() for rank in range(size))


@given(NAMES, st.integers(1, 200), st.integers(1, 16))
def test_blocks_differ_by_at_most_two_rows(name: str, seq_len: int, size: int) -> None:
    layout = build_layout(name, seq_len, size)
    assert max(layout.row_counts) - min(layout.row_counts) <= 2


def test_zigzag_gives_every_rank_equal_causal_work() -> None:
    layout = build_layout("zigzag", 64, 4)
    work = [int((layout.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1


def test_drawn_examples_of_the_docstring_hold() -> None:
    expected = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }
    for name, blocks in expected.items():
        layout = build_layout(name, 8, 2)
        assert [layout.positions(rank).tolist() for rank in range(2)] == blocks


@given(st.integers(0, 50), st.integers(1, 7), st.integers(0, 20), st.integers(-5, 200), st.integers(-5, 200))
def test_rows_between_agrees_with_enumeration(start: int, stride: int, count: int, low: int, high: int) -> None:
    rows = range(*Segment(start, stride, count).rows_between(low, high))
    assert list(rows) == [i for i in range(count) if low <= start + stride * i < high]


@pytest.mark.parametrize(("seq_len", "size"), [(0, 1), (4, 0)])
def test_senseless_sizes_are_refused(seq_len: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build_layout("zigzag", seq_len, size)
