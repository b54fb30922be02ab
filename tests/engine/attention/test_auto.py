"""attention=auto: the ranking follows the links, keeps what is configured, and is the same for every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.cluster import ClusterConfig, MachineConfig
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.topology import Topology
from engine.predict.attention import preview_attention
from engine.predict.machine import find_machine, machine_of
from engine.predict.step_time import timed_ranks
from engine.resolve.attention import proxy_topology
from engine.resolve.auto import resolve_auto

AUTO = RunConfig(
    model=ModelConfig(num_heads=8, num_kv_heads=8, head_dim=64, num_layers=2),
    attention=AttentionConfig(preset="auto"),
    train=TrainConfig(seq_len=4096),
)
SLOW_RAILS = find_machine("cpu", {"inter_bytes_per_s": 25e6})
NODES = Topology(2, 4)


def test_the_first_is_fastest_within_one_percent_and_a_named_preset_replaces_auto() -> None:
    choice = resolve_auto(AUTO, NODES, SLOW_RAILS)
    best, *others = choice.candidates
    assert all(best.seconds <= 1.01 * other.seconds for other in others)
    assert [c.seconds for c in others] == sorted(c.seconds for c in others)
    assert choice.config.attention.preset == best.method.preset != "auto"
    assert best.method.preset in choice.reason
    seconds = {c.method.preset: c.seconds for c in reversed(choice.candidates)}  # slow links put flat rings last
    nested, flat = ("burst", "loongtrain", "burst_ulysses"), ("ring", "striped")
    assert max(seconds[name] for name in nested) < min(seconds[name] for name in flat)
    methods = [replace(c.method, preset="auto", reason="") for c in choice.candidates]  # none comes twice
    assert len(methods) == len(set(methods)) > 8


def test_axes_that_are_configured_stay() -> None:
    config = replace(AUTO, attention=replace(AUTO.attention, layout="striped", gradient_wire_dtype="bfloat16"))
    for candidate in resolve_auto(config, NODES, SLOW_RAILS).candidates:
        assert candidate.method.layout == "striped"
        assert candidate.method.gradient_wire_dtype == "bfloat16"
    config = replace(AUTO, attention=AttentionConfig(preset="ring"))
    choice = resolve_auto(config, NODES, SLOW_RAILS)
    assert choice.config == config
    assert choice.candidates == ()


def test_when_nothing_is_legal_the_rules_are_listed() -> None:
    config = replace(AUTO, attention=replace(AUTO.attention, layout="chunk_cyclic"))
    with pytest.raises(ConfigError, match="chunk_cyclic orders tokens by chunks"):
        resolve_auto(config, NODES, SLOW_RAILS)


def test_methods_for_large_groups_are_shortlisted_in_smaller_ones_and_then_planned_as_they_are() -> None:
    topology, machine = Topology(8, 8), find_machine("h100")
    config = replace(AUTO, train=TrainConfig(seq_len=64 * 1024))
    small, group = proxy_topology(config, topology, 32)
    assert group.local_ranks == 8
    assert group.size == 16
    assert small.train.seq_len / group.size == config.train.seq_len / topology.size
    choice = resolve_auto(config, topology, machine)
    assert len(choice.candidates) == 2
    for candidate in choice.candidates:
        planned = replace(config, attention=candidate.attention)
        preview = preview_attention(planned, topology, machine, timed_ranks(planned, topology))
        assert candidate.seconds == preview.time.seconds


def test_the_machine_is_named_or_found_by_device() -> None:
    assert machine_of(AUTO, "NVIDIA H200").name == "h200"
    assert machine_of(AUTO, "cpu").name == "cpu"
    assert machine_of(replace(AUTO, cluster=ClusterConfig(backend="gloo"))).name == "cpu"
    assert machine_of(AUTO).name == "h100"
    settings = MachineConfig(name="a100", rates=("inter_bytes_per_s=1e9", "shared_nic=1"))
    machine = machine_of(replace(AUTO, cluster=ClusterConfig(machine=settings)), "NVIDIA H200")
    assert machine.name == "a100"
    assert machine.inter_bytes_per_s == 1e9
    assert machine.shared_nic
