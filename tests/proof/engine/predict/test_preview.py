"""Previews count what the plans hold; formulas and brute force are the oracles."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from testkit.resolved import preview_of

from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.program.ops import LinkBytes
from engine.planning.topology import Topology, padded_length
from engine.predict.attention import AttentionPreview
from engine.predict.flops import attention_pairs
from engine.predict.machine import find_machine

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 4, 32, 1024
KV_WIDTH = 2 * KV_HEADS * HEAD_DIM
CPU = find_machine("cpu")


def config_of(preset: str, **settings: object) -> RunConfig:
    """Eight layers of eight heads on 1024 tokens."""
    return RunConfig(
        model=ModelConfig(num_layers=8, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM),
        attention=AttentionConfig(preset=preset, **settings),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=TOKENS, compute_dtype="bfloat16"),
    )


def preview_of_preset(preset: str, size: int = 4, nodes: int = 1, **settings: object) -> AttentionPreview:
    return preview_of(config_of(preset, **settings), Topology(nodes, size // nodes), CPU)


def test_a_double_ring_sends_one_block_per_cycle_to_the_other_node() -> None:
    forward, *_ = preview_of_preset("burst", 8, nodes=2, mask="full", layout="contiguous").passes
    block = TOKENS // 8 * KV_WIDTH * 2
    assert forward.busiest_links == LinkBytes(intra_bytes=2 * (4 - 1) * block, inter_bytes=block)


def test_sequences_of_a_micro_batch_are_sent_together() -> None:
    config = config_of("ring")
    doubled = replace(config, train=replace(config.train, micro_batch_size=2))
    one, two = (preview_of(c, Topology(1, 4), CPU).passes for c in (config, doubled))
    for single, double in zip(one, two, strict=True):
        assert double.busiest_links.intra_bytes == 2 * single.busiest_links.intra_bytes
        assert double.visible_pairs == single.visible_pairs


def test_padding_is_no_work() -> None:
    config = config_of("ring")
    odd = replace(config, train=replace(config.train, seq_len=1001))
    forward, *_ = preview_of(odd, Topology(1, 4), CPU).passes
    assert padded_length(1001, 4) == 1008
    assert forward.visible_pairs == attention_pairs("causal", 1001)


def test_balance_differs_between_contiguous_layout_vs_zigzag() -> None:
    """Of P contiguous causal blocks the last has about (2P - 1) / P times the mean work."""
    assert preview_of_preset("ring").passes[0].balance == 1.0
    contiguous = preview_of_preset("ring", layout="contiguous").passes
    for one in contiguous:
        assert math.isclose(one.balance, 7 / 4, rel_tol=0.01)


def test_buffers_of_a_ring_are_two_blocks_beside_its_inputs() -> None:
    forward = preview_of_preset("ring").passes[0].largest_buffers
    working = [buffers for buffers in forward.buffers if not buffers.is_argument]
    rows = TOKENS // 4
    assert [(b.kind, b.where, b.buffers, b.rows, b.size_bytes) for b in working] == [
        ("kv", "device", 2, 2 * rows, 2 * rows * KV_WIDTH * 2)
    ]
    assert forward.buffer_bytes("device") == sum(b.size_bytes for b in forward.buffers)
    assert forward.buffer_bytes("device", is_argument=False) == working[0].size_bytes
    assert forward.buffer_bytes("host") == 0


def test_buffers_of_head_groups_count_only_their_heads() -> None:
    forward = preview_of_preset("ulysses").passes[0].largest_buffers
    pieces = [b for b in forward.buffers if b.kind == "q" and b.head_parts == 4]
    assert pieces
    for buffers in pieces:
        assert buffers.size_bytes == buffers.rows * HEADS // 4 * HEAD_DIM * 2


def test_layers_that_differ_are_planned_each() -> None:
    preview = preview_of_preset("ring", mask_layers=("causal", "full", "full", "full"))
    assert [(layer.first, layer.count) for layer in preview.layers] == [(0, 2), (1, 6)]
    causal, full = (layer.passes[0].visible_pairs for layer in preview.layers)
    assert causal == attention_pairs("causal", TOKENS)
    assert full == attention_pairs("full", TOKENS)


# Rows of zigzags on either side of 8: 0 1 6 7 | 8 9 14 15 and 2 3 4 5 | 10 11 12 13. Forward of the first half again:
# each rank computes 18 of its 36 pairs, and keys of 16 bytes travel, the first two to rank 1, and 4 to rank 0.
AGAIN = {
    "steps": 2,
    "tiles": 2,
    "visible_pairs": 36,
    "balance": 1.0,
    "bytes_per_layer": {"intra_bytes": 4 * 16, "inter_bytes": 0, "host_bytes": 0},
    "buffers": {
        "device": {"bytes": 8 * (16 + 16) + 4 * (16 + 40 + 24), "argument_bytes": 8 * (16 + 16) + 4 * (40 + 24)},
        "host": {"bytes": 0, "argument_bytes": 0},
        "rank": 0,
        "kinds": [
            {
                "kind": kind,
                "head_parts": 1,
                "where": "device",
                "is_argument": is_argument,
                "buffers": 1,
                "rows": rows,
                "size_bytes": n,
            }
            for kind, is_argument, rows, n in (
                ("kv", True, 8, 128),
                ("kv", False, 4, 64),
                ("q", True, 8, 128),
                ("partial", True, 4, 160),
                ("out_lse", True, 4, 96),
            )
        ],
    },
    "ranks": [
        {
            "rank": rank,
            "steps": 2,
            "tiles": 2,
            "pairs": 18.0,
            "bytes_per_layer": {"intra_bytes": sent, "inter_bytes": 0, "host_bytes": 0},
            "device_buffer_bytes": size,
            "host_buffer_bytes": 0,
        }
        for rank, sent, size in ((0, 2 * 16, 576), (1, 4 * 16, 576 - 2 * 16))
    ],
}


def test_the_document_of_a_ring_of_two_by_hand() -> None:
    """Two heads of 4: a pair is 32 FLOPs forward and 80 backward; sums that come home show: 8 of them at 32 bytes."""
    links = {name: math.inf for name in vars(CPU) if name.endswith("_per_s")} | {"intra_bytes_per_s": 1e3}
    free = {name: 0.0 for name in vars(CPU) if name.endswith(("_latency_s", "_overhead_s", "_rows"))}
    machine = replace(CPU, **{**links, **free, "forward_flops_per_s": 4e3, "backward_flops_per_s": 1e4})
    config = RunConfig(
        model=ModelConfig(num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4),
        attention=AttentionConfig(preset="ring"),
        memory=MemoryConfig(activation_checkpoint="seq_fraction", saved_fraction=0.5),
        train=TrainConfig(seq_len=16, compute_dtype="bfloat16"),
    )
    preview = preview_of(config, Topology(1, 2), machine)
    document = json.loads(json.dumps(preview.to_dict()))
    (layer,) = document.pop("layers")
    assert document == asdict(preview.method)
    passes = layer.pop("passes")
    assert layer == {"layer": 0, "count": 3, "queries_before": 8}
    assert passes["recompute"] == AGAIN
    assert {name: (one["steps"], one["visible_pairs"]) for name, one in passes.items()} == {
        "forward": (2, 136),
        "recompute": (2, 36),
        "backward": (3, 136),
    }
    seconds = {"forward": 68 * 32 / 4e3, "recompute": 18 * 32 / 4e3, "backward": 68 * 80 / 1e4}
    hidden = {
        name: {"seconds": pytest.approx(s), "compute_s": pytest.approx(s), "exposed_s": 0.0, "longest_wait_s": 0.0}
        for name, s in seconds.items()
    }
    late_s = pytest.approx(8 * 32 / 1e3)
    hidden["backward"] |= {"seconds": pytest.approx(0.544 + 0.256), "exposed_s": late_s, "longest_wait_s": late_s}
    assert preview.time_to_dict() == {
        "machine": "cpu",
        "per_layer": hidden,
        "layers": 3,
        "seconds": pytest.approx(3 * (sum(seconds.values()) + 0.256)),
        "exposed_s": pytest.approx(3 * 0.256),
    }


def test_a_pass_of_no_queries_costs_nothing() -> None:
    config = replace(config_of("ring"), memory=MemoryConfig(activation_checkpoint="attn_out"))
    _, again, _ = preview_of(config, Topology(1, 4), CPU).passes
    assert again.steps == 0
    assert again.tiles == 0
    assert again.visible_pairs == 0
    assert again.balance == 1.0
    assert again.busiest_links == LinkBytes()
    assert again.timeline.total_s == 0.0


# Every kind of schedule; `striped` is a few bytes apart, and gathered keys wait a little longer at other ranks.
LARGE = {"striped": (1e-3, 1e-3), "burst": (0.0, 0.0), "burst_ulysses": (0.0, 0.0), "megatron_allgather": (0.0, 0.05)}


@pytest.mark.parametrize("preset", LARGE)
@pytest.mark.thorough_for("striped", "megatron_allgather")
def test_the_planned_ranks_of_a_large_group_show_the_largest_figures_of_all(preset: str) -> None:
    config, topology, machine = config_of(preset), Topology(5, 8), find_machine("h100")
    config = replace(config, train=replace(config.train, seq_len=40 * 256))
    shown = preview_of(config, topology, machine)
    whole = preview_of(config, topology, machine, ranks=tuple(range(40)))
    assert len(shown.planned_ranks) < len(whole.planned_ranks) == 40
    bytes_apart, time_apart = LARGE[preset]
    for some, every in zip(shown.passes, whole.passes, strict=True):
        assert some.visible_pairs == every.visible_pairs == round(sum(rank.pairs for rank in every.ranks))
        assert some.balance == every.balance
        assert some.steps == every.steps
        assert some.tiles == every.tiles
        assert tuple(some.busiest_links) == pytest.approx(tuple(every.busiest_links), rel=bytes_apart)
        assert some.timeline.total_s == pytest.approx(every.timeline.total_s, rel=max(time_apart, 1e-9))


def test_256_ranks_of_an_8b_model_show_their_own_figures() -> None:
    """Not those of a smaller group: 8,192 tokens per rank would be 2**18 in all for 32 ranks, 68G pairs."""
    model = ModelConfig(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    config = RunConfig(
        model=model,
        attention=AttentionConfig(preset="burst"),
        memory=MemoryConfig(activation_checkpoint="none"),
        train=TrainConfig(seq_len=2**20, compute_dtype="bfloat16"),
    )
    preview = preview_of(config, Topology(32, 8), find_machine("h100"))
    forward, backward = preview.passes
    assert forward.visible_pairs == backward.visible_pairs == 2**20 * (2**20 + 1) // 2
    assert forward.balance == pytest.approx(1.0, abs=1e-6)
    assert forward.timeline.total_s < backward.timeline.total_s
    block = 2**20 // 256 * 2 * 8 * 128 * 2  # K and V of a rank, bf16
    assert forward.busiest_links.inter_bytes == 31 * block  # a block goes to every other node, by one rank of each
    assert 31 * block < backward.busiest_links.inter_bytes <= 31 * 3 * block  # and its gradients, in fp32
    # Attention alone, at the rate of the machine's kernels, is a lower bound of the time.
    flops = 32 * 4 * 32 * 128 * forward.visible_pairs / 256
    ideal_s = flops / find_machine("h100").forward_flops_per_s + 2.5 * flops / find_machine("h100").backward_flops_per_s
    assert ideal_s < preview.time.seconds < 1.25 * ideal_s
