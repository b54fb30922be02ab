"""Bands equal the mask's definition, pair by pair, for every combination of conditions."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.attention_oracle import num_pairs, pairs_between, visible

from engine.config.errors import ConfigError
from engine.planning.visibility.layout import build_layout
from engine.planning.visibility.mask import Band, BlockList, Mask, row_strips
from engine.planning.visibility.visible import Visibility

OPTIONAL_WINDOW = st.none() | st.integers(1, 30)


@st.composite
def masks(draw: st.DrawFn, max_len: int = 40) -> Mask:
    seq_len = draw(st.integers(1, max_len))
    starts = draw(st.sets(st.integers(1, max(1, seq_len - 1)), max_size=4)) if draw(st.booleans()) else set()
    documents = (0, *sorted(s for s in starts if s < seq_len)) if starts else ()
    pair = st.tuples(st.integers(0, 8), st.integers(0, 8))
    blocks = draw(st.none() | st.builds(BlockList.from_pairs, st.integers(1, 9), st.frozensets(pair, max_size=20)))
    window = draw(OPTIONAL_WINDOW)
    sink = draw(st.integers(0, 6)) if window else 0
    whole = Mask(seq_len, draw(st.booleans()), window, documents, blocks, sink)
    return whole.queries_before(draw(st.integers(0, seq_len + 2))) if draw(st.booleans()) else whole


LAYOUTS = st.sampled_from(
    ["contiguous", "zigzag", "striped", "chunk_cyclic", "per_document", "balanced", "split_zigzag"]
)


@st.composite
def masks_with_layouts(draw: st.DrawFn) -> Visibility:
    mask, name = draw(masks()), draw(LAYOUTS)
    chunks = draw(st.integers(1, 4)) if name == "chunk_cyclic" else 1
    padded = mask.seq_len + draw(st.integers(0, 5))
    size, split_at = draw(st.integers(1, 5)), draw(st.integers(0, padded)) if name == "split_zigzag" else 0
    return Visibility(mask, build_layout(name, padded, size, masks=(mask,), chunks=chunks, split_at=split_at))


@settings(max_examples=500, deadline=None)
@given(masks_with_layouts())
def test_bands_cover_exactly_the_visible_pairs_once(visibility: Visibility) -> None:
    mask, layout = visibility.mask, visibility.layout
    for q_rank in range(layout.size):
        for kv_rank in range(layout.size):
            queries, keys = layout.positions(q_rank).tolist(), layout.positions(kv_rank).tolist()
            found: Counter[tuple[int, int]] = Counter()
            for band in visibility.bands(q_rank, kv_rank):
                pairs = pairs_of(band)
                assert len(pairs) == band.area() > 0
                assert len({i for i, _ in pairs}) == band.num_queries, "a query that sees nothing"
                assert len({j for _, j in pairs}) == band.num_keys, "a key that nobody sees"
                assert not band.is_causal or band.num_queries == band.num_keys
                assert band == band._replace(low=0) or not band.is_causal
                assert band == Band(*band[:4]) or not band.is_full, "a bound that hides nothing"
                found.update((queries[i], keys[j]) for i, j in pairs)
            assert found == Counter((i, j) for i in queries for j in keys if visible(mask, i, j))


@given(masks(), st.integers(0, 45))
def test_a_mask_without_its_later_queries_is_the_same_before_them(mask: Mask, cut: int) -> None:
    early = mask.queries_before(cut)
    for q, k in itertools.product(range(46), repeat=2):
        assert visible(early, q, k) == (q < cut and visible(mask, q, k))
    assert early.queries_before(7).query_stop == min(7, early.query_stop)
    assert early.all_queries() == mask.all_queries()


@given(masks(), st.lists(st.integers(0, 45), max_size=5))
def test_pairs_before_counts_the_pairs_of_all_earlier_queries(mask: Mask, positions: list[int]) -> None:
    rows = [sum(visible(mask, q, k) for k in range(mask.seq_len)) for q in range(46)]
    counted = mask.pairs_before(np.array(positions, dtype=np.int64)).tolist()
    assert counted == [sum(rows[:position]) for position in positions]
    assert num_pairs(mask) == sum(rows)


def pairs_of(band: Band) -> list[tuple[int, int]]:
    return [
        (band.q_start + i, band.k_start + j)
        for i in range(band.num_queries)
        for j in range(band.num_keys)
        if band.low <= i - j <= band.high
    ]


def test_strips_of_a_window_are_little_more_than_the_window() -> None:
    window = Band(4096, 4096 + (1 << 16), 64, 64 + (1 << 16), 0, 4095)
    strips = row_strips(window, 512)
    assert sum(strip.num_queries * strip.num_keys for strip in strips) <= 1.2 * window.area()


def test_zigzag_needs_one_tile_per_pair_of_ranks() -> None:
    visibility = Visibility(Mask(64), build_layout("zigzag", 64, 4))
    assert all(len(visibility.bands(a, b)) == 1 for a in range(4) for b in range(4))


def test_striped_tiles_are_causal() -> None:
    visibility = Visibility(Mask(64), build_layout("striped", 64, 4))
    assert all(band.is_causal for a in range(4) for b in range(4) for band in visibility.bands(a, b))


def test_local_rows_of_a_causal_document_are_one_tile() -> None:
    mask = Mask(60, documents=(0, 17, 40))
    for name in ("zigzag", "chunk_cyclic", "per_document", "striped"):
        visibility = Visibility(
            mask, build_layout(name, 64, 3, masks=(mask,), chunks=4 if name == "chunk_cyclic" else 1)
        )
        for rank in range(3):
            positions = visibility.layout.positions(rank)
            held = sum(
                bool(((positions >= low) & (positions < high)).any()) for low, high in ((0, 17), (17, 40), (40, 60))
            )
            bands = visibility.bands(rank, rank)
            assert len(bands) == held
            assert all(band.is_causal or band.num_queries == 1 for band in bands)


def test_every_document_has_its_first_tokens_as_sinks() -> None:
    mask = Mask(20, window=3, sink=2, documents=(0, 11))
    seen = {q: [k for k in range(20) if visible(mask, q, k)] for q in (1, 4, 10, 11, 18)}
    assert seen == {1: [0, 1], 4: [0, 1, 2, 3, 4], 10: [0, 1, 8, 9, 10], 11: [11], 18: [11, 12, 16, 17, 18]}


def test_areas_of_a_million_rows_are_closed_forms() -> None:
    rows = 1 << 20
    assert Band(0, rows, 0, rows, low=0).area() == rows * (rows + 1) // 2
    assert Band(0, rows, 0, rows, 0, 7).area() == 8 * rows - 28
    assert Band(0, rows, 0, rows, -3, 3).area() == 7 * rows - 12
    assert num_pairs(Mask(rows, window=8)) == 8 * rows - 28


def random_documents(count: int, seq_len: int) -> tuple[int, ...]:
    starts = np.random.default_rng(0).choice(np.arange(1, seq_len), count - 1, replace=False)
    return (0, *sorted(starts.tolist()))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_hundreds_of_documents_over_a_million_tokens_give_few_tiles(layout: str) -> None:
    mask = Mask(1 << 20, documents=random_documents(600, 1 << 20))
    visibility = Visibility(mask, build_layout(layout, 1 << 20, 32, masks=(mask,)))
    tiles = [sum(len(visibility.bands(q, k)) for k in range(32)) for q in range(32)]
    assert max(tiles) <= 64
    assert sum(pairs_between(visibility, q, k) for q in range(32) for k in range(32)) == num_pairs(mask)


def test_masks_that_cannot_be_are_refused_with_all_that_is_wrong() -> None:
    for documents in ((1, 5), (0, 5, 5), (0, 7, 3), (0, 10)):  # out of order, or out of range
        with pytest.raises(ConfigError, match="document starts"):
            Mask(10, documents=documents)
    with pytest.raises(ConfigError, match="together with a window"):
        Mask(10, sink=2)
    with pytest.raises(ConfigError) as caught:
        Mask(0, window=0, sink=-1, documents=(3,))
    assert len(caught.value.problems) == 4
