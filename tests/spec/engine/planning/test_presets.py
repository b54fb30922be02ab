"""Presets resolve to legal methods, choose by predicted time what circulates and say why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from testkit.resolved import method_of, preview_of

from engine.config.errors import ConfigError
from engine.config.settings import (
    AttentionConfig,
    CheckpointKind,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import AttentionMethod, warnings_of
from engine.planning.topology import Topology
from engine.predict.machine import Machine, find_machine, machine_of
from engine.resolve.attention import select_moving_operand
from engine.resolve.decisions import Rule

MHA = ModelConfig(num_heads=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
GQA = replace(MHA, num_kv_heads=8)


def config_with(preset: str, model: ModelConfig = MHA, **fields: object) -> RunConfig:
    attention = AttentionConfig(preset=preset, **fields)  # type: ignore[arg-type]
    return RunConfig(model=model, attention=attention, train=TrainConfig(seq_len=1 << 20))


def resolve(preset: str, model: ModelConfig = MHA, nodes: int = 2, local: int = 4, **fields: object):
    return method_of(config_with(preset, model, **fields), Topology(nodes, local))


SHAPES = {  # ranks that divide the heads, of an inner ring, of an outer one; the layout
    "ring": (1, 8, 1, "zigzag"),
    "striped": (1, 8, 1, "striped"),
    "burst": (1, 4, 2, "zigzag"),
    "ulysses": (8, 1, 1, "contiguous"),
    "burst_ulysses": (4, 2, 1, "zigzag"),
    "loongtrain": (4, 1, 2, "zigzag"),
    "usp": (4, 2, 1, "zigzag"),
    "megatron_cp": (1, 8, 1, "zigzag"),
    "megatron_allgather": (1, 8, 1, "zigzag"),
    "megatron_hierarchical": (4, 2, 1, "zigzag"),
    "fpdt": (8, 1, 1, "chunk_cyclic"),
    "alst": (8, 1, 1, "contiguous"),
}


@pytest.mark.parametrize("preset", SHAPES)
def test_presets_fit_two_nodes_of_four_ranks(preset: str) -> None:
    method = resolve(preset, nodes=2, local=4, model=ModelConfig(num_heads=8, num_kv_heads=8))
    degrees = (method.head_parallel_size, method.ring_inner_size, method.ring_outer_size, method.layout)
    assert degrees == SHAPES[preset]
    assert (method.chunk_tokens is not None) == (preset == "fpdt")


def predicted(preset: str, model: ModelConfig, topology: Topology, machine: Machine, seq_len: int, **fields: object):
    """(seconds of forward and backward, tiles of both) of a layer."""
    config = RunConfig(
        model=replace(model, num_layers=1),
        attention=AttentionConfig(preset=preset, **fields),  # type: ignore[arg-type]
        memory=MemoryConfig(activation_checkpoint="none"),
        train=TrainConfig(seq_len=seq_len),
    )
    preview = preview_of(config, topology, machine)
    return sum(one.timeline.total_s for one in preview.passes), sum(one.tiles for one in preview.passes)


SLOW_RAILS = find_machine("cpu", {"inter_bytes_per_s": 25e6})


def burst_method(model: ModelConfig, machine: Machine) -> AttentionMethod:
    config = RunConfig(model=model, attention=AttentionConfig(preset="burst"), train=TrainConfig(seq_len=1 << 14))
    return method_of(config, Topology(2, 4), machine)


def test_q_circulates_with_multi_head_attention() -> None:
    method = burst_method(MHA, SLOW_RAILS)
    assert method.backward_circulates == "q"
    assert method.deferred_local_tiles == 2


def test_kv_circulates_with_grouped_query_attention() -> None:
    assert burst_method(GQA, SLOW_RAILS).backward_circulates == "kv"


def test_kv_circulates_over_links_that_cost_nothing() -> None:
    free = replace(SLOW_RAILS, inter_bytes_per_s=1e15, intra_bytes_per_s=1e15, inter_latency_s=0, intra_latency_s=0)
    method = burst_method(MHA, free)
    assert method.backward_circulates == "kv"
    assert method.deferred_local_tiles == 0


@pytest.mark.parametrize("model", [MHA, GQA], ids=["MHA", "GQA"])
@pytest.mark.parametrize(
    "machine", [find_machine("cpu"), SLOW_RAILS, find_machine("h100")], ids=["cpu", "slow", "h100"]
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_burst_is_predicted_no_slower_than_ring_or_than_either_direction(
    model: ModelConfig, machine: Machine, nodes: int
) -> None:
    topology = Topology(nodes, 4)
    for seq_len in (1 << 13, 1 << 16):
        ring_s, ring_tiles = predicted("ring", model, topology, machine, seq_len)
        burst_s, burst_tiles = predicted("burst", model, topology, machine, seq_len)
        named = [
            predicted("burst", model, topology, machine, seq_len, backward_circulates=way)[0] for way in ("kv", "q")
        ]
        assert burst_s <= min(ring_s, *named) * 1.02
        if nodes == 1:
            assert burst_tiles == ring_tiles


@pytest.mark.parametrize(
    ("nodes", "local", "fields", "weighed"),
    [
        (2, 4, {}, ["kv", "q", "kv, 1 deferred", "q, 1 deferred", "kv, 2 deferred", "q, 2 deferred"]),
        (2, 1, {}, ["kv", "q", "kv, 1 deferred", "q, 1 deferred"]),
        (1, 8, {}, ["kv", "q"]),
        (1, 1, {}, []),
        (2, 4, {"backward_circulates": "q"}, ["q", "q, 1 deferred", "q, 2 deferred"]),
        (1, 4, {"backward_circulates": "kv"}, []),
        (2, 4, {"chunk_tokens": 1 << 16}, []),
        (2, 4, {"preset": "ring", "backward_circulates": "auto"}, ["kv", "q"]),
        (2, 4, {"preset": "megatron_cp"}, []),
    ],
)
def test_what_is_left_free_is_weighed(nodes: int, local: int, fields: dict[str, Any], weighed: list[str]) -> None:
    config = config_with(**{"preset": "burst", "model": GQA, **fields})
    _, decision = select_moving_operand(config, Topology(nodes, local), machine_of(config))
    assert list(decision.figures) == weighed
    assert decision.rule == (Rule.FASTEST if weighed else Rule.CONFIGURED)


def test_settings_override_a_preset() -> None:
    method = resolve("burst", ring_inner_size=2, layout="striped", backward_circulates="kv")
    assert method.ring_inner_size == 2
    assert method.ring_outer_size == 4
    assert method.layout == "striped"
    assert method.backward_circulates == "kv"


def test_heads_are_divided_by_their_greatest_common_divisor_with_the_node() -> None:
    method = resolve("usp", nodes=1, local=8, model=ModelConfig(num_heads=12, num_kv_heads=4))
    assert method.head_parallel_size == 4
    assert method.ring_inner_size == 2
    assert method.ring_outer_size == 1


def test_kv_heads_are_replicated_where_ranks_outnumber_them() -> None:
    assert resolve("ulysses", nodes=1, local=8, model=ModelConfig(num_heads=8, num_kv_heads=2)).kv_replicated


def test_head_parallel_ranks_are_those_that_rings_leave() -> None:
    assert resolve("loongtrain", ring_inner_size=2, ring_outer_size=2).head_parallel_size == 2


@pytest.mark.parametrize(
    ("preset", "fields", "problem"),
    [
        ("single", {}, r"set parallel\.cp_size=1 parallel\.dp_shard_size=8, or choose attention=burst"),
        ("megatron_tp", {}, r"set parallel\.cp_size=1 parallel\.tp_size=8, or choose attention=burst"),
        (
            "burst",
            {"ring_inner_size": 3, "ring_outer_size": 3},
            r"= 9 ranks, but 8 ranks .* nearest legal head x inner x outer: 1 x 2 x 4",
        ),
        ("ring", {"local": 1 << 20}, "1048576 tokens for 2097152 ranks; every rank needs at least one"),
        (
            "ulysses",
            {"nodes": 1, "local": 2, "model": ModelConfig(num_heads=6, num_kv_heads=3)},
            "neither divide the 3 kv heads evenly nor hold equally many copies",
        ),
    ],
)
def test_what_the_ranks_cannot_share_is_refused_with_the_remedy(
    preset: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(preset, **fields)


@pytest.mark.parametrize(("size", "expected"), [(4, (1, 4)), (2, (1, 2)), (8, (2, 4)), (6, (6, 1))])
def test_topology_of_a_group_of_consecutive_ranks(size: int, expected: tuple[int, int]) -> None:
    group = Topology(4, 4).group(size)
    assert (group.nodes, group.local_ranks) == expected


def test_every_violated_rule_is_listed_with_the_nearest_legal_degrees() -> None:
    model = ModelConfig(num_heads=6, num_kv_heads=2)
    with pytest.raises(ConfigError) as caught:
        resolve(
            "loongtrain",
            model=model,
            head_parallel_size=4,
            ring_inner_size=3,
            ring_outer_size=1,
            backward_order="reversed",
            backward_circulates="q",
            layout="chunk_cyclic",
            chunk_store="host",
        )
    text = "\n".join(caught.value.problems)
    for rule in (
        "= 12 ranks, but 8 ranks share a sequence",
        "4 ranks cannot divide 6 query heads evenly; nearest legal head x inner x outer: ",
        "chunk_cyclic orders tokens by chunks",
        "chunk_store=host needs chunks",
        "reversed moves k and v",
    ):
        assert rule in text
    for legal in text.split("outer: ")[1].splitlines()[0].split(", "):
        heads, inner, outer = map(int, legal.split(" x "))
        assert heads * inner * outer == 8
        assert 6 % heads == 0


def test_all_gather_leaves_nothing_to_turn_around_or_to_circulate() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("megatron_allgather", backward_circulates="q", backward_order="reversed")
    assert len(caught.value.problems) == 3


def test_an_inner_ring_that_crosses_nodes_is_warned_of() -> None:
    topology = Topology(2, 4)
    config = RunConfig(attention=AttentionConfig(preset="burst", ring_inner_size=8, ring_outer_size=1))
    assert warnings_of(method_of(config, topology), topology) == []  # a flat ring is what it says
    config = RunConfig(attention=AttentionConfig(preset="burst", ring_inner_size=1, ring_outer_size=8))
    assert warnings_of(method_of(config, topology), topology) == []
    odd = Topology(3, 2)
    config = RunConfig(attention=AttentionConfig(preset="burst", ring_inner_size=3, ring_outer_size=2))
    assert "inner hops cross nodes" in warnings_of(method_of(config, odd), odd)[0]


@pytest.mark.parametrize(
    ("attention", "others", "layout"),
    [
        ({"documents": True}, {}, "balanced"),
        ({"documents": True, "layout": "zigzag"}, {}, "zigzag"),
        ({"documents": True, "preset": "striped"}, {}, "striped"),
        ({"documents": True, "mask": "window", "window_tokens": 64}, {}, "contiguous"),
        ({"documents": True}, {"parallel": ParallelConfig(tp_size=2)}, "zigzag"),
        ({}, {}, "zigzag"),
    ],
    ids=str,
)
def test_where_documents_are_apart_work_is_balanced_by_their_lengths(
    attention: dict[str, Any], others: dict[str, Any], layout: str
) -> None:
    config = RunConfig(attention=AttentionConfig(**{"preset": "ring", **attention}), **others)
    assert method_of(config, Topology(1, 4)).layout == layout


def layers_of(
    memory: MemoryConfig, seq_len: int = 100, **attention: object
) -> tuple[AttentionMethod, list[int | None]]:
    """The method on four ranks, and where recomputation of the layers in turn ends."""
    config = RunConfig(
        model=ModelConfig(num_heads=8, num_kv_heads=4, head_dim=8),
        attention=AttentionConfig(**{"preset": "ring", **attention}),  # type: ignore[arg-type]
        memory=memory,
        train=TrainConfig(seq_len=seq_len),
    )
    method = method_of(config, Topology(1, 4))
    return method, [layer.recompute_before for layer in attention_layers(config, method)]


def test_patterns_of_masks_combine_with_those_of_policies() -> None:
    kinds: tuple[CheckpointKind, ...] = ("full", "seq_fraction", "attn_out", "none")
    _, cuts = layers_of(MemoryConfig(checkpoint_layers=kinds), mask_layers=("causal", "full", "causal"))
    assert cuts == [104, 48, 0, None] * 3  # 100 tokens are padded to 104; half, in units of 2 * 4 tokens: 48 or 56


@pytest.mark.parametrize(
    ("saved_fraction", "attention", "layout"),
    [
        (0.5, {}, "split_zigzag"),
        (0.0, {}, "zigzag"),
        (1.0, {}, "zigzag"),
        (0.5, {"layout": "zigzag"}, "zigzag"),
        (0.5, {"preset": "striped"}, "striped"),
        (0.5, {"mask": "window", "window_tokens": 9}, "contiguous"),
    ],
)
def test_a_zigzag_is_split_where_recomputation_ends(
    saved_fraction: float, attention: dict[str, object], layout: str
) -> None:
    memory = MemoryConfig(activation_checkpoint="seq_fraction", saved_fraction=saved_fraction)
    method, (cut,) = layers_of(memory, 96, **attention)
    assert method.layout == layout
    assert method.split_at == (cut if layout == "split_zigzag" else 0)
