"""Which ports are kept, and the reason of each that is not."""

from __future__ import annotations

from typing import Any

import pytest
from env_topologies import interface, kept, node, port, reason

from cluster.env.facts import StorageRoute
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig, ExpectedHardware

GOOD = port("mlx5_0", netdev="ib0")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "DOWN", "phys_state": "Polling"}, "state DOWN, Polling"),
        ({"state": "INIT"}, "state INIT"),
        ({"state": ""}, "state unknown"),
        ({"phys_state": "Disabled"}, "physical link is not up: Disabled"),
        ({"link_layer": "Ethernet"}, "link layer is Ethernet"),
        ({"rate_gbps": 200.0}, "200 Gbit/s, slower than the fastest of this node have 400"),
        ({"rate_gbps": None}, "a rate it does not tell, slower"),
        ({"is_bond": True}, "a bond"),
        ({"is_virtual_function": True}, "a virtual function"),
        ({"netdev": "eth0"}, "carries the default route"),
    ],
)
def test_an_odd_port_beside_a_good_one_is_dropped_and_told_why(fields: dict[str, Any], words: str) -> None:
    environment = node(GOOD, port("mlx5_1", **fields))
    assert kept(environment) == ["mlx5_0"]
    assert words in reason(environment, "mlx5_1")
    assert environment.value("NCCL_IB_HCA") == "=mlx5_0:1"


@pytest.mark.parametrize("lower", [{"bond0": ("eth2", "eth3")}, {"vlan7": ("bond0",), "bond0": ("eth2",)}])
def test_a_route_over_a_bond_or_vlan_counts_for_what_lies_below(lower: dict[str, tuple[str, ...]]) -> None:
    top = next(iter(lower))
    interfaces = (interface(top, addresses=("10.0.0.1/24",), is_default_route=True),)
    environment = node(GOOD, port("mlx5_1", netdev="eth2"), interfaces=interfaces, lower_interfaces=lower)
    assert f"(as part of {top}) carries the default route" in reason(environment, "mlx5_1")


def test_storage_over_a_bond_counts_for_what_lies_below() -> None:
    storage = (StorageRoute("/data", "10.9.0.5", "bond0"),)
    environment = node(GOOD, port("mlx5_1", netdev="eth2"), storage=storage, lower_interfaces={"bond0": ("eth2",)})
    assert "eth2 (as part of bond0) leads to the storage server" in reason(environment, "mlx5_1")


def test_interfaces_that_lie_below_each_other_end() -> None:
    environment = node(GOOD, lower_interfaces={"eth0": ("eth0",), "a": ("b",), "b": ("a",)})
    assert kept(environment) == ["mlx5_0"]


def test_one_fast_ethernet_port_does_not_outvote_four_of_infiniband() -> None:
    ports = [port(f"mlx5_{index}", rate_gbps=200.0) for index in range(4)]
    environment = node(*ports, port("mlx5_4", link_layer="Ethernet", rate_gbps=400.0))
    assert len(kept(environment)) == 4
    assert "most bandwidth of the node is InfiniBand (4 ports, 800 Gbit/s)" in reason(environment, "mlx5_4")


def test_infiniband_for_storage_does_not_outvote_eight_of_roce() -> None:
    ports = [port(f"mlx5_{index}", link_layer="Ethernet") for index in range(8)]
    environment = node(*ports, port("mlx5_8"), port("mlx5_9"))
    assert kept(environment) == [f"mlx5_{index}" for index in range(8)]


def test_a_tie_of_link_layers_goes_to_infiniband() -> None:
    assert kept(node(port("mlx5_0", link_layer="Ethernet"), port("mlx5_1"))) == ["mlx5_1"]


def test_a_virtual_machine_keeps_its_virtual_functions_and_says_so() -> None:
    environment = node(*(port(f"mlx5_{index}", is_virtual_function=True) for index in range(2)))
    assert kept(environment) == ["mlx5_0", "mlx5_1"]
    assert "the node has nothing else" in reason(environment, "mlx5_0")


def test_a_network_built_of_bonds_is_used() -> None:
    bonds = [port(f"mlx5_bond_{index}", link_layer="Ethernet", is_bond=True) for index in range(4)]
    environment = node(*bonds, port("mlx5_0", link_layer="Ethernet", rate_gbps=25.0))
    assert kept(environment) == [f"mlx5_bond_{index}" for index in range(4)]
    assert "most of the network" in reason(environment, "mlx5_bond_0")
    assert "25 Gbit/s, slower" in reason(environment, "mlx5_0")


def test_a_bond_faster_than_the_only_infiniband_port_is_dropped_all_the_same() -> None:
    bond = port("mlx5_bond_0", link_layer="Ethernet", rate_gbps=200.0, is_bond=True)
    assert kept(node(port("mlx5_0", rate_gbps=100.0), bond)) == ["mlx5_0"]


def test_the_only_infiniband_port_stays_though_storage_uses_it() -> None:
    environment = node(GOOD, storage=(StorageRoute("/data", "10.9.0.5", "ib0"),))
    assert kept(environment) == ["mlx5_0"]
    assert "the node has no other port as fast" in reason(environment, "mlx5_0")


@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_bond_0"])
def test_the_only_port_of_roce_stays_with_a_warning_though_it_carries_the_default_route(name: str) -> None:
    ethernet = {"link_layer": "Ethernet", "netdev": "eth0", "is_bond": "bond" in name}
    environment = node(port(name, rate_gbps=100.0, **ethernet), port("mlx5_9", link_layer="Ethernet", rate_gbps=25.0))
    assert (kept(environment), environment.value("NCCL_IB_DISABLE")) == ([name], None)
    (warning,) = [text for text in environment.warnings if "carries the default route" in text]
    assert warning.endswith("but the node has no other port as fast")


@pytest.mark.parametrize(("ports", "expected"), [(8, 8), (9, 8), (5, 4)])
def test_a_port_of_storage_stays_only_where_gpus_would_have_to_share_more(ports: int, expected: int) -> None:
    gpus = tuple(GpuAddress(index) for index in range(8))
    names = [port(f"mlx5_{index}", netdev=f"ib{index}") for index in range(ports)]
    environment = node(*names, gpus=gpus, storage=(StorageRoute("/home", "10.9.0.5", "ib0"),))
    assert len(kept(environment)) == expected
    told = [text for text in environment.warnings if "leads to the storage server" in text]
    why = ["without it 8 GPUs would share 7 ports"] if expected == ports else []
    assert [text.rpartition("but ")[2] for text in told] == why


def test_the_expected_number_of_ports_brings_back_those_that_storage_shares() -> None:
    config = ClusterConfig(expected=ExpectedHardware(hcas=2))
    storage = (StorageRoute("/data", "10.9.0.5", "ib1"),)
    environment = node(GOOD, port("mlx5_1", netdev="ib1"), storage=storage, config=config)
    assert kept(environment) == ["mlx5_0", "mlx5_1"]
    assert "cluster.expected.hcas=2 counts it" in reason(environment, "mlx5_1")
    assert environment.warnings == ()


def test_another_number_of_ports_than_expected_is_a_warning() -> None:
    environment = node(GOOD, config=ClusterConfig(expected=ExpectedHardware(hcas=8)))
    assert "1 ports kept, cluster.expected.hcas=8" in environment.warnings


def test_the_expected_rate_is_the_floor() -> None:
    config = ClusterConfig(expected=ExpectedHardware(hca_rate_gbps=200.0))
    ports = (port("mlx5_0", rate_gbps=400.0), port("mlx5_1", rate_gbps=200.0), port("mlx5_2", rate_gbps=100.0))
    environment = node(*ports, config=config)
    assert kept(environment) == ["mlx5_0", "mlx5_1"]
    assert "slower than cluster.expected.hca_rate_gbps is 200 Gbit/s" in reason(environment, "mlx5_2")


def test_where_nothing_reaches_the_expected_rate_the_fastest_stay_with_a_warning() -> None:
    config = ClusterConfig(expected=ExpectedHardware(hca_rate_gbps=400.0))
    environment = node(port("mlx5_0", rate_gbps=200.0), config=config)
    assert kept(environment) == ["mlx5_0"]
    assert any("no port reaches cluster.expected.hca_rate_gbps=400" in warning for warning in environment.warnings)


def test_both_ports_of_an_adapter_are_judged_by_themselves() -> None:
    second = port("mlx5_0").__class__("mlx5_0", 2, "InfiniBand", "DOWN", "Polling")
    environment = node(GOOD, second)
    assert environment.value("NCCL_IB_HCA") == "=mlx5_0:1"


def test_ports_are_listed_as_people_count() -> None:
    environment = node(*(port(f"mlx5_{index}") for index in (10, 2, 1)), gpus=(), config=ClusterConfig(backend="nccl"))
    assert environment.value("NCCL_IB_HCA") == "=mlx5_1:1,mlx5_2:1,mlx5_10:1"
