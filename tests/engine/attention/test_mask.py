"""Bands equal the mask's definition, pair by pair, for every combination of conditions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.layout import build_layout
from engine.attention.mask import Band, BlockList, Mask, Visibility, normalise
from engine.errors import ConfigError

OPTIONAL_WINDOW = st.none() | st.integers(1, 30)


@st.composite
def masks(draw: st.DrawFn, max_len: int = 40) -> Mask:
    seq_len = draw(st.integers(1, max_len))
    starts = draw(st.sets(st.integers(1, max(1, seq_len - 1)), max_size=4)) if draw(st.booleans()) else set()
    documents = (0, *sorted(s for s in starts if s < seq_len)) if starts else ()
    pair = st.tuples(st.integers(0, 8), st.integers(0, 8))
    blocks = draw(st.none() | st.builds(BlockList, st.integers(1, 9), st.frozensets(pair, max_size=20)))
    return Mask(seq_len, draw(st.booleans()), draw(OPTIONAL_WINDOW), documents, blocks)


@settings(max_examples=300, deadline=None)
@given(masks(), st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 5), st.integers(0, 5))
def test_bands_cover_exactly_the_visible_pairs_once(mask: Mask, name: str, size: int, padding: int) -> None:
    layout = build_layout(name, mask.seq_len + padding, size)
    visibility = Visibility(mask, layout)
    for q_rank in range(size):
        for kv_rank in range(size):
            queries, keys = layout.positions(q_rank).tolist(), layout.positions(kv_rank).tolist()
            found: Counter[tuple[int, int]] = Counter()
            for band in visibility.bands(q_rank, kv_rank):
                pairs = list(pairs_of(band))
                assert len(pairs) == band.area()
                found.update((queries[i], keys[j]) for i, j in pairs)
            assert found == Counter((i, j) for i in queries for j in keys if mask.visible(i, j))


def pairs_of(band: Band) -> list[tuple[int, int]]:
    low = -1000 if band.low is None else band.low
    high = 1000 if band.high is None else band.high
    return [
        (band.q_start + i, band.k_start + j)
        for i in range(band.num_queries)
        for j in range(band.num_keys)
        if low <= i - j <= high
    ]


OFFSET = st.none() | st.integers(-20, 20)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), OFFSET, OFFSET)
def test_normalised_bands_have_no_empty_rows_and_square_causal_tiles(
    rows: int, keys: int, low: int | None, high: int | None
) -> None:
    original = Band(0, rows, 0, keys, low, high)
    bands = normalise(original)
    for band in bands:
        pairs = pairs_of(band)
        assert {i for i, _ in pairs} == set(range(band.q_start, band.q_stop))
        assert {j for _, j in pairs} == set(range(band.k_start, band.k_stop))
        assert not band.is_causal or band.num_queries == band.num_keys
    assert Counter(pair for band in bands for pair in pairs_of(band)) == Counter(pairs_of(original))


def test_zigzag_needs_one_tile_per_pair_of_ranks() -> None:
    visibility = Visibility(Mask(64), build_layout("zigzag", 64, 4))
    assert all(len(visibility.bands(a, b)) == 1 for a in range(4) for b in range(4))


def test_striped_causal_tiles_stay_causal() -> None:
    visibility = Visibility(Mask(64), build_layout("striped", 64, 4))
    assert all(band.is_causal for a in range(4) for b in range(4) for band in visibility.bands(a, b))


@pytest.mark.parametrize("documents", [(1, 5), (0, 5, 5), (0, 7, 3)])
def test_documents_out_of_order_are_refused(documents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="document starts"):
        Mask(10, documents=documents)


def test_all_mask_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Mask(0, window=0)
    assert len(caught.value.problems) == 2
