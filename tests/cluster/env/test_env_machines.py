"""Recorded machines get the environment that their files state by hand."""

from __future__ import annotations

import pytest
from env_topologies import MACHINES, SISTERS, kept, machine, recorded

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_environment, plan_fleet
from engine.config_cluster import ClusterConfig


def plan(name: str) -> NodeEnvironment:
    return plan_environment(machine(name), ClusterConfig())


def test_the_set_of_recorded_machines_is_complete() -> None:
    assert len(MACHINES) >= 10
    assert set(SISTERS) <= set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_variables_are_exactly_those_stated(name: str) -> None:
    environment = plan(name)
    assert {one.name: one.value for one in environment.variables} == recorded(name)["expected"]["variables"]
    assert [one.name for one in environment.left_out] == recorded(name)["expected"]["left_out"]


@pytest.mark.parametrize("name", MACHINES)
def test_every_variable_and_port_has_a_reason(name: str) -> None:
    environment = plan(name)
    assert all(one.reason for one in (*environment.variables, *environment.left_out, *environment.hcas))
    assert {decision.port.name for decision in environment.hcas} == {port.name for port in machine(name).ports}


@pytest.mark.parametrize("name", MACHINES)
def test_dropped_ports_are_those_stated_for_the_stated_reasons(name: str) -> None:
    dropped = {one.port.device: one.reason for one in plan(name).hcas if not one.kept}
    expected = recorded(name)["expected"]["dropped"]
    assert dropped.keys() == expected.keys()
    for device, words in expected.items():
        assert words in dropped[device]


@pytest.mark.parametrize("name", MACHINES)
def test_every_gpu_gets_the_stated_rail(name: str) -> None:
    environment = plan(name)
    expected = recorded(name)["expected"]
    assert [rail.port.device for rail in environment.rails] == expected["rails"]
    assert [rail.gpu for rail in environment.rails] == list(range(len(expected["rails"])))
    for words in expected["found_by"]:
        assert any(words in rail.found_by for rail in environment.rails)


@pytest.mark.parametrize("name", MACHINES)
def test_pci_paths_and_topo_agree(name: str) -> None:
    assert list(plan(name).warnings) == recorded(name)["expected"]["warnings"]


@pytest.mark.parametrize("name", [name for name in MACHINES if recorded(name)["expected"]["rails"]])
def test_without_pci_paths_topo_finds_rails_that_share_no_more(name: str) -> None:
    """nvidia-smi alone is as good as sysfs, where adapters are no nearer than NUMA nodes excepted."""
    facts = machine(name)
    blind = tuple(type(gpu)(gpu.index) for gpu in facts.gpus)
    environment = plan_environment(machine(name, gpus=blind), ClusterConfig())
    assert [rail.port.device for rail in environment.rails] == recorded(name)["expected"]["rails"]
    assert all("nvidia-smi topo -m" in rail.found_by for rail in environment.rails)


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
