"""attention=auto: the ranking follows the links, keeps what is configured, and is the same for every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testkit.resolved import preview_of

from engine.config.cluster import ClusterConfig, MachineConfig
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.topology import Topology
from engine.predict.machine import find_machine, machine_of
from engine.predict.step_time import timed_ranks
from engine.resolve.attention import proxy_group, rank_methods, select_preset
from engine.resolve.decisions import Decision, Rule

AUTO = RunConfig(
    model=ModelConfig(num_heads=8, num_kv_heads=8, head_dim=64, num_layers=2),
    attention=AttentionConfig(preset="auto"),
    train=TrainConfig(seq_len=4096),
)
SLOW_RAILS = find_machine("cpu", {"inter_bytes_per_s": 25e6})
NODES = Topology(2, 4)


@pytest.fixture(scope="module")
def selected() -> tuple[AttentionConfig, Decision]:
    """The preset selected for two nodes with slow links between them."""
    return select_preset(AUTO, NODES, SLOW_RAILS)


def test_auto_is_replaced_by_the_preset_of_the_best_candidate(selected: tuple[AttentionConfig, Decision]) -> None:
    attention, decision = selected
    assert attention.preset == decision.candidates[0].method.preset != "auto"
    assert decision.value == attention.preset
    assert decision.rule == Rule.FASTEST


def test_the_first_candidate_is_fastest_within_one_percent(selected: tuple[AttentionConfig, Decision]) -> None:
    best, *others = selected[1].candidates
    assert all(best.seconds <= 1.01 * other.seconds for other in others)
    assert [c.seconds for c in others] == sorted(c.seconds for c in others)


def test_slow_links_put_flat_rings_last(selected: tuple[AttentionConfig, Decision]) -> None:
    seconds = {c.method.preset: c.seconds for c in reversed(selected[1].candidates)}
    nested, flat = ("burst", "loongtrain", "burst_ulysses"), ("ring", "striped")
    assert max(seconds[name] for name in nested) < min(seconds[name] for name in flat)


def test_every_method_is_a_candidate_once(selected: tuple[AttentionConfig, Decision]) -> None:
    methods = [replace(c.method, preset="auto") for c in selected[1].candidates]
    assert len(methods) == len(set(methods)) > 8


def test_axes_that_are_configured_stay() -> None:
    config = replace(AUTO, attention=replace(AUTO.attention, layout="striped", gradient_wire_dtype="bfloat16"))
    for candidate in rank_methods(config, NODES, SLOW_RAILS):
        assert candidate.method.layout == "striped"
        assert candidate.method.gradient_wire_dtype == "bfloat16"
    config = replace(AUTO, attention=AttentionConfig(preset="ring"))
    attention, decision = select_preset(config, NODES, SLOW_RAILS)
    assert attention == config.attention
    assert decision.rule == Rule.CONFIGURED
    assert decision.candidates == ()


def test_when_nothing_is_legal_the_rules_are_listed() -> None:
    config = replace(AUTO, attention=replace(AUTO.attention, layout="chunk_cyclic"))
    with pytest.raises(ConfigError, match="chunk_cyclic orders tokens by chunks"):
        select_preset(config, NODES, SLOW_RAILS)


LARGE_GROUP = replace(AUTO, train=TrainConfig(seq_len=64 * 1024)), Topology(8, 8)


def test_a_proxy_group_has_the_tokens_per_rank_of_the_large_one() -> None:
    config, topology = LARGE_GROUP
    small, group = proxy_group(config, topology, 32)
    assert group.local_ranks == 8
    assert group.size == 16
    assert small.train.seq_len / group.size == config.train.seq_len / topology.size


def test_finalists_of_a_large_group_are_planned_at_full_size() -> None:
    (config, topology), machine = LARGE_GROUP, find_machine("h100")
    candidates = rank_methods(config, topology, machine)
    assert len(candidates) == 2
    for candidate in candidates:
        planned = replace(config, attention=candidate.attention)
        preview = preview_of(planned, topology, machine, timed_ranks(planned, topology))
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
