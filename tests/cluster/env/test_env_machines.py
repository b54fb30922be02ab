"""Recorded machines get the environment that their files state by hand."""

from __future__ import annotations

import pytest
from env_topologies import MACHINES, SISTERS, kept, machine, recorded

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_environment, plan_fleet
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


def test_sisters_get_lists_of_their_own_in_rail_order_and_no_warning() -> None:
    fleet = plan_fleet([machine(name) for name in SISTERS], ClusterConfig())
    lists = {name: [device.removeprefix("mlx5_") for device in kept(fleet[name])] for name in SISTERS}
    assert lists == {
        "sister1": ["0", "1", "2", "5", "6", "7", "8", "11"],
        "sister2": ["0", "3", "4", "5", "6", "9", "10", "11"],
        "sister3": ["0", "1", "2", "3", "4", "5", "6", "7"],
        "sister4": ["1", "2", "3", "4", "7", "8", "9", "10"],
    }
    assert all(fleet[name].warnings == () for name in SISTERS)


def test_a_plan_depends_on_nothing_but_its_facts() -> None:
    facts = machine("h100_12nics")
    shuffled = machine("h100_12nics", ports=facts.ports[::-1], gpus=facts.gpus[::-1])
    assert plan_environment(shuffled, ClusterConfig()) == plan_environment(facts, ClusterConfig())
