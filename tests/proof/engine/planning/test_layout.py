"""Layouts cover every position once, in ascending local order, balanced as promised."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.attention_oracle import pairs_between

from engine.planning.visibility.layout import Layout, build_layout
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility

NAMES = st.sampled_from(["contiguous", "zigzag", "striped", "chunk_cyclic", "per_document", "balanced", "split_zigzag"])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    name, seq_len, size = draw(NAMES), draw(st.integers(1, 200)), draw(st.integers(1, 16))
    real = draw(st.integers(max(1, seq_len - 9), seq_len))
    starts = draw(st.sets(st.integers(1, 199), max_size=20))
    mask = Mask(
        real, window=draw(st.none() | st.integers(1, 50)), documents=(0, *sorted(s for s in starts if s < real))
    )
    chunks = draw(st.integers(1, 5)) if name == "chunk_cyclic" else 1
    split_at = draw(st.integers(0, seq_len)) if name == "split_zigzag" else 0
    return build_layout(name, seq_len, size, masks=(mask,), chunks=chunks, split_at=split_at)


@settings(deadline=None)
@given(layouts())
def test_every_position_is_on_exactly_one_rank(layout: Layout) -> None:
    positions = [layout.positions(rank) for rank in range(layout.size)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(layout.seq_len))
    assert [len(p) for p in positions] == list(layout.row_counts)


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 200), st.integers(1, 16))
def test_blocks_differ_by_at_most_two_rows(name: str, seq_len: int, size: int) -> None:
    layout = build_layout(name, seq_len, size)
    assert max(layout.row_counts) - min(layout.row_counts) <= 2


@given(st.integers(1, 7), st.sets(st.integers(1, 199), max_size=60), st.integers(0, 9))
def test_per_document_divides_every_document_evenly(size: int, starts: set[int], padding: int) -> None:
    mask = Mask(200, documents=(0, *sorted(starts)))
    layout = build_layout("per_document", 200 + padding, size, masks=(mask,))
    assert max(layout.row_counts) - min(layout.row_counts) <= 1
    positions = [layout.positions(rank) for rank in range(size)]
    for low, high in itertools.pairwise([*mask.documents, 200]):
        shares = [int(((p >= low) & (p < high)).sum()) for p in positions]
        assert max(shares) - min(shares) <= 2


def test_per_document_gives_every_rank_equal_work_of_every_document() -> None:
    mask = Mask(96, documents=(0, 16, 64))
    visibility = Visibility(mask, build_layout("per_document", 96, 4, masks=(mask,)))
    assert len({sum(pairs_between(visibility, q, k) for k in range(4)) for q in range(4)}) == 1


@given(layouts(), st.integers(0, 210))
@settings(deadline=None)
def test_rows_before_a_position_are_the_first_ones(layout: Layout, position: int) -> None:
    for rank, rows in enumerate(layout.row_counts):
        first = layout.rows_before(rank, position)
        assert (layout.positions(rank) < position).tolist() == [row < first for row in range(rows)]


def test_drawn_examples_of_the_docstring_hold() -> None:
    expected = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "chunk_cyclic": [[0, 1, 4, 5], [2, 3, 6, 7]],
        "per_document": [[0, 3, 4, 7], [1, 2, 5, 6]],
        "balanced": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "split_zigzag": [[0, 3, 4, 7], [1, 2, 5, 6]],
    }
    for name, blocks in expected.items():
        mask = Mask(8, documents=(0, 4))
        layout = build_layout(
            name, 8, 2, masks=(mask,), chunks=1 + (name == "chunk_cyclic"), split_at=4 * (name == "split_zigzag")
        )
        assert [layout.positions(rank).tolist() for rank in range(2)] == blocks
