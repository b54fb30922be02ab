"""What masks save on the wire."""

from __future__ import annotations

import pytest

from engine.attention.layers import attention_layers
from engine.attention.layout import build_layout
from engine.attention.mask import Mask, Visibility
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.plan import AttentionPlan, Kind, TokenBytes
from engine.attention.planners.ring import Ring, plan_forward
from engine.attention.presets import resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, ModelConfig, RunConfig, TrainConfig

HEADS = 8
TOKENS = TokenBytes(HEADS, HEADS, 16)
RANKS = Topology(1, 8)


def sent(plan: AttentionPlan) -> int:
    return sum(link.total for link in plan.bytes_by_link(TOKENS, RANKS).values())


def forward_bytes(seq_len: int, **attention: object) -> int:
    config = RunConfig(
        model=ModelConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=16),
        attention=AttentionConfig(**attention),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=seq_len),
    )
    (layer,) = attention_layers(config, resolve_attention(config, RANKS))
    return sent(plan_method(layer.method, layer.mask, divide_sequence(layer.method, seq_len, [layer.mask])).forward)


def contiguous_bytes(mask: Mask) -> int:
    layout = build_layout("contiguous", mask.seq_len, RANKS.size)
    return sent(plan_forward(Visibility(mask, layout), Ring(RANKS.size, direction=1)))


@pytest.mark.parametrize("preset", ["ring", "burst", "megatron_allgather"])
def test_a_window_of_an_eighth_on_eight_ranks_moves_at_most_two_sevenths_of_the_ring(preset: str) -> None:
    window = {"mask": "window", "window_tokens": 512}
    whole = forward_bytes(4096, preset="ring")
    assert 0 < forward_bytes(4096, preset=preset, **window) <= 2 / 7 * whole
    # Under a zigzag its keys lie on two more ranks: hence contiguous blocks where every layer has a window.
    assert forward_bytes(4096, preset=preset, layout="zigzag", **window) > 2 / 7 * whole


def test_a_window_shorter_than_a_block_crosses_one_edge_per_rank() -> None:
    window = 65  # the rows before each of seven edges, K and V in 16 bits
    assert forward_bytes(4096, preset="burst", mask="window", window_tokens=window) == 7 * (window - 1) * TOKENS.of(
        Kind.KV
    )


def test_a_sink_costs_one_block_and_then_only_its_own_rows_per_hop() -> None:
    rows, sink = 1 << 16, 64
    more = contiguous_bytes(Mask(rows, window=rows // 64, sink=sink)) - contiguous_bytes(Mask(rows, window=rows // 64))
    assert 0 < more <= (rows // 8 + 6 * sink) * TOKENS.of(Kind.KV)  # rank 1: both ends of the first block; 2 to 7: sink


def test_documents_that_end_at_a_ranks_edge_move_nothing() -> None:
    assert contiguous_bytes(Mask(1024, documents=tuple(range(0, 1024, 64)))) == 0
