"""Recorded machines get the environment that their files state by hand."""

from __future__ import annotations

import pytest
from env_topologies import MACHINES, machine, node, port, recorded

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_environment
from engine.config.cluster import ClusterConfig


def plan(name: str) -> NodeEnvironment:
    return plan_environment(machine(name), ClusterConfig())


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gets_exactly_what_is_stated(name: str) -> None:
    environment, expected = plan(name), recorded(name)["expected"]
    assert {one.name: one.value for one in environment.variables} == expected["variables"]
    assert [one.name for one in environment.left_out] == expected["left_out"]
    assert all(one.reason for one in (*environment.variables, *environment.left_out, *environment.hcas))
    assert {decision.port.name for decision in environment.hcas} == {port.name for port in machine(name).ports}
    dropped = {one.port.device: one.reason for one in environment.hcas if not one.kept}
    assert dropped.keys() == expected["dropped"].keys()
    assert all(words in dropped[device] for device, words in expected["dropped"].items())
    assert [(rail.gpu, rail.port.device) for rail in environment.rails] == list(enumerate(expected["rails"]))
    for words in expected["found_by"]:
        assert any(words in rail.found_by for rail in environment.rails)
    assert list(environment.warnings) == expected["warnings"]


def test_a_plan_depends_on_nothing_but_its_facts() -> None:
    facts = machine("h100_12nics")
    shuffled = machine("h100_12nics", ports=facts.ports[::-1], gpus=facts.gpus[::-1])
    assert plan_environment(shuffled, ClusterConfig()) == plan_environment(facts, ClusterConfig())


def test_an_environment_is_a_document() -> None:
    environment = node(port("mlx5_0", netdev="ib0"), port("mlx5_1", phys_state="Disabled"), notes=("a note",))
    assert [one.is_fault for one in environment.hcas] == [False, True]
    layer = {"link_layer": "InfiniBand", "rate_gbps": 400.0}
    dropped = "its physical link is not up: Disabled"
    assert environment.to_dict() == {
        "node": "node1",
        "interface": "eth0",
        "variables": {one.name: one.value for one in environment.variables},
        "reasons": {one.name: one.reason for one in environment.variables},
        "left_out": {"NCCL_CROSS_NIC": "one rail: there is nothing to cross"},
        "hcas": [
            {"port": "mlx5_0:1", "kept": True, "reason": "up, InfiniBand, 400 Gbit/s", "netdev": "ib0", **layer},
            {"port": "mlx5_1:1", "kept": False, "reason": dropped, "netdev": None, **layer},
        ],
        "rails": [{"gpu": 0, "port": "mlx5_0:1", "found_by": "taking turns, for no port is nearer than another"}],
        "warnings": ["a note"],
    }
