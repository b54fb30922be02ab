"""Every kind of mask under every layout on 1 to 8 ranks: tiles against brute force, and what the ring then moves."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from engine.attention.counting import prove_plan
from engine.attention.layout import build_layout
from engine.attention.mask import Band, BlockList, Mask, Visibility
from engine.attention.patterns import MaskOptions, build_mask, strided_blocks, vertical_slash_blocks
from engine.attention.plan import Kind, TokenBytes
from engine.attention.planners.ring import Ring, plan_backward, plan_forward
from engine.attention.topology import Topology
from engine.config import LayoutName

ROWS, PADDED = 61, 64  # 61 is prime: no size divides it
SIZES = (1, 2, 3, 5, 7, 8)
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "zigzag", "striped", "chunk_cyclic", "per_document", "balanced")
LISTED = BlockList.from_pairs(5, [(0, 0), (1, 0), (2, 2), (2, 1), (4, 12), (7, 2), (8, 2), (8, 3), (12, 4), (12, 12)])

CROSSING = (0, 3, 14, 30, 47)  # every edge of 64 tokens' chunks (sizes 2, 4, 8) lies inside a document
TINY = (0, 1, 2, 3, 20, 21, 40, 59, 60)

MASKS: dict[str, Mask] = {
    "causal": Mask(ROWS),
    "full": Mask(ROWS, causal=False),
    "window smaller than a chunk": Mask(ROWS, window=2),
    "window of one": Mask(ROWS, window=1),
    "window larger than a rank": Mask(ROWS, window=37),
    "two-sided window": Mask(ROWS, causal=False, window=6),
    "wide two-sided window": Mask(ROWS, causal=False, window=33),
    "sink window": Mask(ROWS, window=5, sink=3),
    "sink larger than a chunk": Mask(ROWS, window=4, sink=19),
    "two-sided sink window": Mask(ROWS, causal=False, window=4, sink=6),
    "documents across edges": Mask(ROWS, documents=CROSSING),
    "documents of length 1": Mask(ROWS, documents=TINY),
    "only documents of length 1": Mask(ROWS, documents=tuple(range(ROWS))),
    "full documents": Mask(ROWS, causal=False, documents=CROSSING),
    "windowed documents": Mask(ROWS, window=6, documents=TINY),
    "sinks in documents": Mask(ROWS, window=6, sink=2, documents=CROSSING),
    "strided": Mask(ROWS, blocks=strided_blocks(16, 4, 3, 2)),
    "strided, windowed documents": Mask(ROWS, window=9, documents=CROSSING, blocks=strided_blocks(16, 4, 3, 2)),
    "vertical slash": Mask(ROWS, blocks=vertical_slash_blocks(21, 3, (0, 4, 5), (0, 1, 7))),
    "vertical slash, sinks": Mask(ROWS, window=9, sink=4, blocks=vertical_slash_blocks(21, 3, (0, 4), (0, 1, 2, 3))),
    "listed blocks": Mask(ROWS, blocks=LISTED),
    "listed blocks both ways in documents": Mask(ROWS, causal=False, documents=CROSSING, blocks=LISTED),
}


@cache
def dense(name: str) -> npt.NDArray[np.int64]:
    """Times that each pair [PADDED, PADDED] must be computed, by the definition."""
    mask = MASKS[name]
    return np.array([[mask.visible(q, k) for k in range(PADDED)] for q in range(PADDED)], dtype=np.int64)


def entries(band: Band) -> npt.NDArray[np.bool_]:
    difference = np.arange(band.num_queries)[:, None] - np.arange(band.num_keys)[None, :]
    seen = np.ones_like(difference, dtype=np.bool_)
    if band.low is not None:
        seen &= difference >= band.low
    if band.high is not None:
        seen &= difference <= band.high
    return seen


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_the_mask_exactly_once_and_hold_no_blind_row(name: str, layout_name: LayoutName) -> None:
    mask = MASKS[name]
    for size in SIZES:
        chunks = 3 if layout_name == "chunk_cyclic" else 1
        layout = build_layout(layout_name, PADDED, size, masks=(mask,), chunks=chunks)
        visibility = Visibility(mask, layout)
        computed = np.zeros((PADDED, PADDED), dtype=np.int64)
        for q_rank in range(size):
            for kv_rank in range(size):
                queries, keys = layout.positions(q_rank), layout.positions(kv_rank)
                for band in visibility.bands(q_rank, kv_rank):
                    seen = entries(band)
                    assert seen.size
                    assert seen.any(0).all()
                    assert seen.any(1).all()
                    assert not band.is_causal or band.num_queries == band.num_keys
                    rows = np.ix_(queries[band.q_start : band.q_stop], keys[band.k_start : band.k_stop])
                    computed[rows] += seen
        assert (computed == dense(name)).all(), size


@pytest.mark.parametrize(("name", "layout_name"), list(zip(MASKS, itertools.cycle(LAYOUTS), strict=False)))
def test_ring_plans_of_every_mask_are_proven_by_counting(name: str, layout_name: LayoutName) -> None:
    mask, chunks = MASKS[name], 3 if layout_name == "chunk_cyclic" else 1
    visibility = Visibility(mask, build_layout(layout_name, PADDED, 3, masks=(mask,), chunks=chunks))
    for plan in (plan_forward(visibility, Ring(3)), plan_backward(visibility, Ring(3), "q")):
        plan.validate()
        prove_plan(plan, visibility, late=True)


TOKENS = TokenBytes(num_heads=8, num_kv_heads=8, head_dim=128)


def forward_bytes(mask: Mask, layout_name: LayoutName, direction: Literal[-1, 1] = -1) -> int:
    rows, size = mask.seq_len, 8
    visibility = Visibility(mask, build_layout(layout_name, rows, size, masks=(mask,)))
    links = plan_forward(visibility, Ring(size, direction=direction)).bytes_by_link(TOKENS, Topology(1, size))
    return sum(link.total for link in links.values())


def test_a_window_of_an_eighth_on_8_ranks_moves_at_most_two_sevenths_of_the_causal_ring() -> None:
    rows = 1 << 16
    window = build_mask("window", rows, MaskOptions(window_tokens=rows // 8))
    causal = forward_bytes(Mask(rows), "zigzag")
    assert forward_bytes(window, "contiguous") <= 2 / 7 * causal
    assert forward_bytes(window, "zigzag") > 2 / 7 * causal  # its keys lie on two more ranks than contiguous ones


def test_a_sink_costs_one_block_and_then_only_its_own_rows_per_hop() -> None:
    rows, sink = 1 << 16, 64
    window = forward_bytes(Mask(rows, window=rows // 64), "contiguous", 1)
    with_sink = forward_bytes(Mask(rows, window=rows // 64, sink=sink), "contiguous", 1)
    # rank 1 needs both ends of the first block, ranks 2 to 7 the sink
    assert with_sink - window <= (rows // 8 + 6 * sink) * TOKENS.of(Kind.KV)


def test_documents_that_end_at_a_ranks_edge_move_nothing() -> None:
    assert forward_bytes(Mask(1024, documents=tuple(range(0, 1024, 64))), "contiguous") == 0
