"""What planners hand to kernels: bands that are full, causal and square, or windows; nothing that would need another.

So FlashAttention's windows suffice for every mask, and no kernel for arbitrary masks is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.api import WINDOWED
from engine.attention.counting import band_mask
from engine.attention.kernels.base import BandSpec
from engine.attention.kernels.cuda import window_of
from engine.attention.layers import attention_layers
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.plan import Tile
from engine.attention.presets import PRESETS, resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, LayoutName, MaskKind, ModelConfig, RunConfig, TrainConfig

MASKS: dict[MaskKind, dict[str, object]] = {
    "causal": {},
    "full": {},
    "window": {"window_tokens": 7},
    "sink_window": {"window_tokens": 5, "sink_tokens": 2},
    "strided": {"block_tokens": 4, "block_stride": 3},
    "vertical_slash": {"block_tokens": 5, "slash_blocks": (0, 2)},
}
LAYOUTS: list[LayoutName | None] = [None, "contiguous", "zigzag", "striped", "balanced"]
PRESET_NAMES = [name for name in PRESETS if name not in ("single", "megatron_tp")]


def tiles_of(attention: AttentionConfig, topology: Topology, rows: int, starts: tuple[int, ...]) -> Iterator[Tile]:
    heads = 2 * topology.size
    config = RunConfig(
        model=ModelConfig(num_heads=heads, num_kv_heads=heads, head_dim=8),
        attention=attention,
        train=TrainConfig(seq_len=rows),
    )
    (layer,) = attention_layers(config, resolve_attention(config, topology), starts if attention.documents else ())
    blocks = divide_sequence(layer.method, -(-rows // topology.size) * topology.size, [layer.mask])
    plans = plan_method(layer.method, layer.mask, blocks)
    for plan in (plans.forward, plans.backward):
        yield from itertools.chain.from_iterable(rank.tiles() for rank in plan.ranks.values())


def check(tile: Tile, may_be_window: bool) -> None:
    queries, keys = tile.q.stop - tile.q.start, tile.kv.stop - tile.kv.start
    band = BandSpec(tile.low, tile.high)
    seen = band_mask(queries, keys, tile.low, tile.high)
    assert seen.any(0).all(), f"a key that nobody sees: {tile}"
    assert seen.any(1).all(), f"a query that sees nothing: {tile}"
    if band.is_causal:
        assert queries == keys, f"causal, but not square: {tile}"
    elif not band.is_full:
        window_of(band, queries, keys)  # asserts that it is one
        assert may_be_window, f"a window under a mask without one: {tile}"


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionConfig, Topology, int, tuple[int, ...]]:
    mask = draw(st.sampled_from(list(MASKS)))
    preset = draw(st.sampled_from(PRESET_NAMES))
    axes: dict[str, object] = {"chunk_tokens": draw(st.integers(3, 9))} if PRESETS[preset].chunked else {}
    layout = draw(st.sampled_from(LAYOUTS))
    if layout is not None and not PRESETS[preset].chunked:
        axes["layout"] = layout
    attention = AttentionConfig(preset=preset, mask=mask, documents=draw(st.booleans()), **MASKS[mask], **axes)  # type: ignore[arg-type]
    topology = Topology(*draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (1, 5), (3, 2)])))
    rows = draw(st.integers(30, 60))
    inner = draw(st.sets(st.integers(1, rows - 1), max_size=5))
    return attention, topology, rows, (0, *sorted(inner))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_tile_is_full_square_causal_or_a_window(
    case: tuple[AttentionConfig, Topology, int, tuple[int, ...]],
) -> None:
    attention, topology, rows, starts = case
    count = 0
    for tile in tiles_of(attention, topology, rows, starts):
        check(tile, attention.mask in WINDOWED)
        count += 1
    assert count > 0


@pytest.mark.parametrize("mask", WINDOWED)
def test_windowed_masks_do_give_windows(mask: MaskKind) -> None:
    attention = AttentionConfig(preset="ring", mask=mask, **MASKS[mask])  # type: ignore[arg-type]
    bands = [BandSpec(tile.low, tile.high) for tile in tiles_of(attention, Topology(1, 3), 50, ())]
    assert any(not (band.is_full or band.is_causal) for band in bands)
