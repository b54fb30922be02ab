"""What presets do with masks: bytes that windows save, axes that have no name of their own."""

from __future__ import annotations

import pytest

from engine.attention.counting import prove_pair
from engine.attention.layers import attention_layers
from engine.attention.methods import PlanPair, channels_of, divide_sequence, plan_method
from engine.attention.plan import HOST_CHANNELS, TokenBytes
from engine.attention.presets import PRESETS, resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, ModelConfig, RunConfig, TrainConfig

HEADS = 8
TOKENS = TokenBytes(HEADS, HEADS, 16)


def plans_of(seq_len: int, topology: Topology, **attention: object) -> tuple[PlanPair, object, object]:
    config = RunConfig(
        model=ModelConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=16),
        attention=AttentionConfig(**attention),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=seq_len),
    )
    (layer,) = attention_layers(config, resolve_attention(config, topology))
    blocks = divide_sequence(layer.method, seq_len, [layer.mask])
    return plan_method(layer.method, layer.mask, blocks), layer.mask, blocks


def forward_bytes(seq_len: int, topology: Topology, **attention: object) -> int:
    plans, _, _ = plans_of(seq_len, topology, **attention)
    return sum(link.total for link in plans.forward.bytes_by_link(TOKENS, topology).values())


@pytest.mark.parametrize("preset", ["ring", "burst", "megatron_allgather"])
def test_a_window_of_an_eighth_on_eight_ranks_moves_at_most_two_sevenths_of_the_ring(preset: str) -> None:
    seq_len, topology = 4096, Topology(1, 8)
    whole = forward_bytes(seq_len, topology, preset="ring")
    windowed = forward_bytes(seq_len, topology, preset=preset, mask="window", window_tokens=seq_len // 8)
    assert 0 < windowed <= 2 / 7 * whole


def test_a_window_shorter_than_a_block_crosses_one_edge_per_rank() -> None:
    seq_len, window = 4096, 65
    sent = forward_bytes(seq_len, Topology(1, 8), preset="burst", mask="window", window_tokens=window)
    assert sent == 7 * (window - 1) * 2 * HEADS * 16 * 2  # the rows before each of seven edges, K and V in 16 bits


UNNAMED = {
    "chunks of keys around a ring": {"preset": "ring", "chunk_tokens": 9},
    "chunks, heads and a double ring": {"preset": "loongtrain", "head_parallel_size": 2, "chunk_tokens": 5},
    "ring of queries under striped heads": {"preset": "usp", "layout": "striped", "backward_circulates": "q"},
    "heads between nodes": {"preset": "loongtrain", "placement": "context_first", "head_parallel_size": 2},
    "reversed ring inside head groups": {"preset": "usp", "backward_order": "reversed", "head_parallel_size": 4},
    "gathered keys inside head groups": {"preset": "usp", "kv_transport": "all_gather", "head_parallel_size": 2},
    "long tail of a flat ring": {"preset": "ring", "tail_steps": 1, "backward_circulates": "q"},
    "16-bit gradients in a balanced layout": {
        "preset": "burst",
        "layout": "balanced",
        "gradient_wire_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("axes", UNNAMED.values(), ids=UNNAMED)
def test_points_without_a_name_are_proven_like_the_others(axes: dict[str, object]) -> None:
    plans, mask, blocks = plans_of(80, Topology(2, 4), **axes)
    for plan in (plans.forward, plans.backward):
        plan.validate()
    for late in (True, False):
        prove_pair(plans, mask, blocks, late=late)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].shape != "alone"])
@pytest.mark.parametrize("nodes_and_ranks", [(1, 4), (2, 2), (4, 1), (2, 4), (3, 2)], ids=str)
def test_plans_keep_to_the_channels_that_are_opened_for_them(preset: str, nodes_and_ranks: tuple[int, int]) -> None:
    topology = Topology(*nodes_and_ranks)
    for extra in (
        {},
        {"mask": "window", "window_tokens": 9},
        {"tail_steps": 2, "backward_circulates": "q"},
        {"chunk_tokens": 7},
    ):
        if "tail_steps" in extra and preset not in ("ring", "burst", "burst_ulysses", "usp", "loongtrain"):
            continue
        heads = {"head_parallel_size": 2} if preset in ("usp", "loongtrain") and topology.size % 2 == 0 else {}
        if "chunk_tokens" in extra and preset in ("megatron_cp", "megatron_allgather", "megatron_hierarchical"):
            continue  # chunks travel a plain ring
        if topology.size == 6 and preset in ("ulysses", "fpdt", "alst"):
            continue  # 8 heads
        plans, _, _ = plans_of(96, topology, preset=preset, **extra, **heads)
        config = AttentionConfig(preset=preset, **extra, **heads)  # type: ignore[arg-type]
        model = ModelConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=16)
        run = RunConfig(model=model, attention=config, train=TrainConfig(seq_len=96))
        opened = {*channels_of(resolve_attention(run, topology)), *HOST_CHANNELS}
        for plan in (plans.forward, plans.backward):
            used = {transfer.channel for rank in plan.ranks.values() for transfer in rank.transfers()}
            assert used <= opened, (preset, extra, used - opened)
