"""The environment of a node from its facts: which ports, which rails, which variables, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from env_topologies import MACHINES, SISTERS, interface, machine, node, port, recorded

from cluster.env.hcas import map_rails, rail_order
from cluster.env.plan import NodeEnvironment, plan_environment, plan_fleet
from cluster.survey.drivers import GpuAddress
from cluster.survey.facts import NodeFacts
from cluster.survey.network import StorageRoute
from cluster.survey.rdma import HcaPort
from engine.config.cluster import ClusterConfig, ExpectedHardware

CONFIG = ClusterConfig()
ETHERNET = {"link_layer": "Ethernet"}
TURNS = "taking turns, for no port is nearer than another"


def expected(**hardware: Any) -> dict[str, Any]:
    return {"config": ClusterConfig(expected=ExpectedHardware(**hardware))}


def storage(way: str, **facts: Any) -> dict[str, Any]:
    return {"storage": (StorageRoute("/data", "10.9.0.5", way),), **facts}


def said(environment: NodeEnvironment) -> dict[str, tuple[str | None, str]]:
    """Value and reason of every variable; of one that is left out the value is None."""
    found = {one.name: (one.value, one.reason) for one in environment.variables}
    return found | {one.name: (None, one.reason) for one in environment.left_out}


# Recorded machines.


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_gets_exactly_what_is_stated(name: str) -> None:
    environment, stated = plan_environment(machine(name), CONFIG), recorded(name)["expected"]
    assert {one.name: one.value for one in environment.variables} == stated["variables"]
    assert [one.name for one in environment.left_out] == stated["left_out"]
    assert all(one.reason for one in (*environment.variables, *environment.left_out, *environment.hcas))
    assert {decision.port.name for decision in environment.hcas} == {port.name for port in machine(name).adapters.ports}
    dropped = {one.port.device: one.reason for one in environment.hcas if not one.kept}
    assert dropped.keys() == stated["dropped"].keys()
    assert all(words in dropped[device] for device, words in stated["dropped"].items())
    assert [(rail.gpu, rail.port.device) for rail in environment.rails] == list(enumerate(stated["rails"]))
    assert all(any(words in rail.found_by for rail in environment.rails) for words in stated["found_by"])
    assert list(environment.warnings) == stated["warnings"]


def test_a_plan_depends_on_nothing_but_its_facts_and_is_a_document() -> None:
    facts = machine("h100_12nics")
    shuffled = machine("h100_12nics", ports=facts.adapters.ports[::-1], gpus=facts.gpu_addresses[::-1])
    assert plan_environment(shuffled, CONFIG) == plan_environment(facts, CONFIG)
    environment = node(port("mlx5_0", netdev="ib0"), port("mlx5_1", phys_state="Disabled"), trouble="a note")
    assert [one.is_fault for one in environment.hcas] == [False, True]
    reason = (
        "1 of 2 ports: InfiniBand, 400 Gbit/s, in the order of GPUs; `=`: these names exactly (without it mlx5_1 also"
    )
    assert said(environment)["NCCL_IB_HCA"] == ("=mlx5_0:1", f"{reason} takes mlx5_10)")
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
        "rails": [{"gpu": 0, "port": "mlx5_0:1", "found_by": TURNS}],
        "warnings": ["a note"],
    }


# Ports: `+` kept with a remark, `-` dropped, `!` a warning.

GOOD = port("mlx5_0", netdev="ib0")
MOST = "most bandwidth of the node is"
TO_STORAGE = "leads to the storage server 10.9.0.5 (/data)"
SLOWER = "slower than the fastest of this node have 400 Gbit/s"


def told(*ports: HcaPort, **facts: Any) -> list[str]:
    """The kept ports, then what is said of any."""
    environment = node(*ports, **facts)
    lines = [f"{'+' if one.kept else '-'} {one.port.name}: {one.reason}" for one in environment.hcas]
    kept = [one.port.name.removeprefix("mlx5_") for one in environment.hcas if one.kept]
    warnings = [f"! {warning}" for warning in environment.warnings]
    return [" ".join(kept), *(line for line in lines if line[0] == "-" or ";" in line), *warnings]


VLAN = {"netdev": "eth2", "ways": ("eth2", "bond0", "vlan7"), "default_route": "vlan7"}
BONDED = {"netdev": "ib2", "ways": ("ib2", "bond0")}


@pytest.mark.parametrize(
    ("fields", "facts", "reason"),
    [
        ({"state": "DOWN", "phys_state": "Polling"}, {}, "its link is not up: state DOWN, Polling"),
        ({"state": "", "phys_state": ""}, {}, "its link is not up: state unknown, unknown"),
        ({"phys_state": "Disabled"}, {}, "its physical link is not up: Disabled"),
        (ETHERNET, {}, f"its link layer is Ethernet; {MOST} InfiniBand (1 ports, 400 Gbit/s)"),  # of a tie
        ({"rate_gbps": 200.0}, {}, f"200 Gbit/s, {SLOWER}"),
        ({"rate_gbps": None}, {}, f"a rate it does not tell, {SLOWER}"),
        ({"is_bond": True}, {}, "a bond of several ports"),
        ({**ETHERNET, "rate_gbps": 800.0, "is_bond": True}, {}, "a bond of several ports"),
        ({"is_virtual_function": True}, {}, "a virtual function"),
        ({"netdev": "eth0", "default_route": "eth0"}, {}, "its interface eth0 carries the default route"),
        ({"netdev": "ib1"}, storage("ib1"), f"its interface ib1 {TO_STORAGE}"),
        (BONDED, storage("bond0"), f"its interface ib2 (as part of bond0) {TO_STORAGE}"),
        (VLAN, {}, "its interface eth2 (as part of vlan7) carries the default route"),
    ],
)
def test_an_odd_port_beside_a_good_one_is_dropped_and_told_why(
    fields: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    assert told(GOOD, port("mlx5_1", **fields), **facts) == ["0:1", f"- mlx5_1:1: {reason}"]


def many(count: int, **fields: Any) -> list[HcaPort]:
    return [port(f"mlx5_{index}", netdev=f"ib{index}", **fields) for index in range(count)]


EIGHT = {"gpus": tuple(GpuAddress(index) for index in range(8))}
ROCE0 = port("mlx5_0", netdev="eth0", default_route="eth0", rate_gbps=100.0, **ETHERNET)
BOND, SLOW = port("mlx5_8", is_bond=True, **ETHERNET), port("mlx5_9", rate_gbps=25.0, **ETHERNET)
SOME = [port("mlx5_1", rate_gbps=200.0), port("mlx5_2", rate_gbps=100.0)]
NO_OTHER = "but the node has no other port as fast"
USED, DROPPED = "! mlx5_0:1 is used for the ranks: its interface", f"- mlx5_0:1: its interface ib0 {TO_STORAGE}"
TWO_ENDS = [port("mlx5_10"), HcaPort("mlx5_9", 2, "InfiniBand", "DOWN", ""), port("mlx5_9")]
MIXED = [*many(3, **ETHERNET), port("mlx5_8"), port("mlx5_9", rate_gbps=1.0)]
TOO_SLOW = "! no port reaches cluster.expected.hca_rate_gbps=400; the fastest have 200"


@pytest.mark.parametrize(
    ("ports", "facts", "kept", "words"),
    [
        # The link layer with most bandwidth, neither that of one fast port nor InfiniBand for storage.
        ([*many(4, rate_gbps=200.0), port("mlx5_4", **ETHERNET)], {}, "0 1 2 3", f"{MOST} InfiniBand (4 ports, 800"),
        (MIXED, {}, "0 1 2", f"{MOST} Ethernet (3 ports"),
        # A virtual machine, and a network that is built of bonds.
        (many(1, is_virtual_function=True), {}, "0", "; a virtual function, but the node has nothing else"),
        ([BOND, SLOW], {}, "8", "; a bond, as most of the network of this node"),
        # What carries other traffic stays where ranks would lose by it: nothing as fast is left, or GPUs share more.
        ([GOOD], storage("ib0"), "0", f"{USED} ib0 {TO_STORAGE}, {NO_OTHER}"),
        ([ROCE0, SLOW], {}, "0", f"{USED} eth0 carries the default route, {NO_OTHER}"),
        (many(8), storage("ib0", **EIGHT), "0 1 2 3 4 5 6 7", "but without it 8 GPUs would share 7 ports"),
        (many(9), storage("ib0", **EIGHT), "1 2 3 4 5 6 7 8", DROPPED),
        (many(5), storage("ib0", **EIGHT), "1 2 3 4", DROPPED),
        # What is expected brings back what storage shares, without a warning, is the floor, or is missed.
        (many(2), storage("ib1", **expected(hcas=2)), "0 1", f"{TO_STORAGE}, but cluster.expected.hcas=2 counts it"),
        ([GOOD], expected(hcas=8), "0", "! 1 ports kept, cluster.expected.hcas=8"),
        ([GOOD, *SOME], expected(hca_rate_gbps=200.0), "0 1", "slower than cluster.expected.hca_rate_gbps is 200 Gbit"),
        (SOME, expected(hca_rate_gbps=400.0), "1", TOO_SLOW),
        # Both ports of an adapter are judged by themselves; people count 9, 10.
        (TWO_ENDS, {}, "9 10", "- mlx5_9:2: its link"),
    ],
)
def test_ports_of_a_node(ports: list[HcaPort], facts: dict[str, Any], kept: str, words: str) -> None:
    found, *lines = told(*ports, **facts)
    assert found == " ".join(f"{number}:1" for number in kept.split())
    assert words in "\n".join(lines)
    is_forced = "but without" in words or NO_OTHER in words
    assert is_forced == any("is used for the ranks" in line for line in lines)


# Rails.


@pytest.mark.parametrize(
    ("ports", "gpus", "rails", "found_by"),
    [
        (["r:1/b/x", "r:1/b/c/y"], ["r:1/b/c/g"], "1", "the longest common PCI path (3 bridges)"),
        (["r:9/b/c/x", "r:1/y"], ["r:1/b/c/g"], "1", "the longest common PCI path (1 bridge)"),  # from the root
        (["r:1/x", "q:1/y"], ["q:2/g"], "1", "the same PCI host bridge"),
        (["r:1/x 1", "q:1/y 0"], ["s:1/g 0", "t:1/h 1"], "1 0", "the same NUMA node"),
        (["r:1/s/x", "r:1/s/y"], ["r:1/s/g", "r:1/s/h", "r:1/s/i"], "0 1 0", "the longest common PCI path (2 bridges)"),
        (["", ""], ["", "", ""], "0 1 0", TURNS),
        ([], [""], "", ""),
    ],
)
def test_a_gpu_gets_the_nearest_port(ports: list[str], gpus: list[str], rails: str, found_by: str) -> None:
    def place(text: str) -> tuple[tuple[str, ...], int | None]:
        path, _, numa = text.partition(" ")
        return tuple(filter(None, path.split("/"))), int(numa) if numa else None

    places = [GpuAddress(index, *place(text)) for index, text in reversed([*enumerate(gpus)])]
    adapters = [replace(port(f"mlx5_{at}"), **dict(zip(("pci_path", "numa_node"), place(text), strict=True)))
                for at, text in enumerate(ports)]  # fmt: skip
    found = map_rails(places, adapters)
    assert " ".join(rail.port.device.removeprefix("mlx5_") for rail in found) == rails
    assert {rail.found_by for rail in found} <= {found_by}
    assert [rail.gpu for rail in found] == [*range(len(found))]


def test_ports_are_ordered_by_the_first_gpu_they_serve_and_idle_ones_last() -> None:
    ports = [port("mlx5_2"), port("mlx5_0", path="r2/b"), port("mlx5_1", path="r1/a"), port("mlx5_10"), port("mlx5_9")]
    rails = map_rails([GpuAddress(0, ("r1", "x")), GpuAddress(1, ("r2", "y"))], ports)
    assert [one.device for one in rail_order(rails, ports)] == ["mlx5_1", "mlx5_0", "mlx5_2", "mlx5_9", "mlx5_10"]


DEAD = machine("sister2", ports=tuple(replace(one, state="DOWN") if one.device == "mlx5_4" else one
                                      for one in machine("sister2").adapters.ports))  # fmt: skip
UNEQUAL = [machine("a100_4nics"), machine("h20_8nics")]


@pytest.mark.parametrize(
    ("facts", "warnings"),
    [
        ([machine(name) for name in SISTERS], {}),
        *(([machine("h100_12nics", node=f"n{index}") for index in range(count)], {}) for count in (1, 2)),
        ([machine("sister1"), DEAD, machine("sister3")], {"sister2": "7 rails, 8 on most nodes"}),
        # Neither is the rule.
        (UNEQUAL, {"a100_4nics": "4 rails, the nodes have 4, 8", "h20_8nics": "8 rails, the nodes have 4, 8"}),
    ],
)
def test_nodes_whose_rails_differ_from_those_of_most_are_told(facts: list[NodeFacts], warnings: dict[str, str]) -> None:
    found = {name: one.warnings for name, one in plan_fleet(facts, CONFIG).items() if one.warnings}
    assert found == {
        name: (f"{text}: a ring is as fast as its node with the fewest",) for name, text in warnings.items()
    }


# Variables.


def roce(*networks: str) -> dict[str, Any]:
    """Two RoCE ports, and interfaces in these networks."""
    ports = tuple(port(f"mlx5_{at}", netdev=f"eth{at + 1}", roce_v2={3: f"10.{at}.0.1"}, **ETHERNET) for at in (0, 1))
    places = tuple(interface(f"eth{at}", addresses=(network,)) for at, network in enumerate(networks, start=1))
    return {"ports": ports, "interfaces": places}


def subnets(*prefixes: str) -> dict[str, Any]:
    """Ports in InfiniBand subnets; an empty one has no GID."""
    gid = "{}:0000:0000:0001:0002:c903:0000:0001"
    gids = ({0: ("IB/RoCE v1", gid.format(prefix))} if prefix else {} for prefix in prefixes)
    return {"ports": tuple(replace(port(f"mlx5_{index}"), gids=told) for index, told in enumerate(gids))}


APART = roce("10.0.0.1/24", "10.1.0.1/24")
CUT = "every rail is an IPv4 network of its own without a gateway: rails cannot cross"
NOT_KNOWN = "whether rails reach each other is not known (no IPv4 addresses); NCCL decides"
ONE_SUBNET = "all ports lie in one InfiniBand subnet, as far as their GIDs tell: rails may cross"
SHARED = "rails share IPv4 networks: they may cross"


@pytest.mark.parametrize(
    ("facts", "value", "reason"),
    [
        (APART, "0", CUT),
        ({**APART, "gateways": frozenset({"eth0"})}, "0", CUT),
        ({**APART, "gateways": frozenset({"eth1"})}, None, "rails have gateways (eth1): they may cross"),
        (roce("10.0.0.1/24"), None, NOT_KNOWN),
        (roce("10.0.0.1/16", "10.0.1.1/16"), None, SHARED),
        (subnets("fe80", "fec0"), "0", "the ports lie in 2 InfiniBand subnets: rails cannot cross"),
        (subnets("fe80", "fe80"), None, ONE_SUBNET),
        (subnets("fe80", "fec0", ""), None, ONE_SUBNET),
        ({"ports": APART["ports"][:1]}, None, "one rail: there is nothing to cross"),
    ],
)
def test_rails_that_cannot_cross_are_told_to_nccl(facts: dict[str, Any], value: str | None, reason: str) -> None:
    assert said(node(**facts))["NCCL_CROSS_NIC"] == (value, reason)


def test_debug_files_go_into_the_run_folder_and_nowhere_without_one() -> None:
    planned = [plan_environment(machine("h100_12nics"), CONFIG, log_dir=log_dir) for log_dir in (None, "/logs")]
    without, into = ({one.name: one.value for one in environment.variables} for environment in planned)
    assert into == without | {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": "/logs/nccl.%h.%p.log",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/flight_recorder_rank",
    }
    assert len(into) == len(without) + 5


@pytest.mark.parametrize(
    ("cores", "gpus", "cluster", "value", "reason"),
    [
        (30, 4, {}, "7", "30 cores for 4 ranks"),
        (2, 4, {}, "1", "2 cores for 4 ranks"),
        (6, 0, {}, "6", "6 cores for 1 rank"),
        (30, 4, {"ranks_per_node": 2}, "15", "30 cores for 2 ranks"),
        (30, 4, {"threads_per_rank": 3}, "3", "cluster.threads_per_rank=3"),
        (None, 4, {}, None, "the number of cores is not known"),
    ],
)
def test_threads_are_cores_over_ranks_unless_configured(
    cores: int | None, gpus: int, cluster: dict[str, int], value: str | None, reason: str
) -> None:
    places = tuple(GpuAddress(index) for index in range(gpus))
    found = said(node(gpus=places, cores=cores, config=ClusterConfig(**cluster)))
    assert found["OMP_NUM_THREADS"] == (value, reason)


@pytest.mark.parametrize(
    ("config", "gpus", "why"),
    [(ClusterConfig(backend="gloo"), 8, "cluster.backend=gloo"), (CONFIG, 0, "the node has no GPU")],
)
def test_ranks_on_gloo_get_no_nccl_variables_and_the_flight_recorder(
    config: ClusterConfig, gpus: int, why: str
) -> None:
    facts = machine("h100_12nics", gpus=machine("h100_12nics").gpu_addresses[:gpus])
    environment = plan_environment(facts, config, log_dir="/l")
    names = ["GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "OMP_NUM_THREADS"]
    assert [one.name for one in environment.variables] == names
    assert said(environment)["NCCL_*"] == (None, f"{why}: ranks talk by gloo")
    assert "NCCL_*" not in said(node(gpus=(), config=ClusterConfig(backend="nccl")))


UNFIT = "none of its ports will do"


@pytest.mark.parametrize(
    ("ports", "why"),
    [
        ((), "the node has no InfiniBand or RoCE port"),
        ((port("mlx5_0", state="INIT"),), f"{UNFIT}: mlx5_0:1: its link is not up: state INIT, LinkUp"),
    ],
)
def test_a_node_without_ports_has_infiniband_switched_off_and_says_why(ports: tuple[HcaPort, ...], why: str) -> None:
    assert said(node(*ports))["NCCL_IB_DISABLE"] == ("1", f"{why}; NCCL uses sockets")


NO_GID = "has no GID of RoCE v2 over IPv4"
NO_GPUDIRECT = "no GPUDirect RDMA (neither nvidia_peermem nor DMA-BUF): NCCL copies through host memory"
NO_INTERFACE = "no network interface is chosen: eth1 or eth2; set cluster.interface to the one that reaches the other"


@pytest.mark.parametrize(
    ("facts", "warnings"),
    [
        ({"gpudirect": False}, [NO_GPUDIRECT]),
        *(({"gpudirect": known}, []) for known in (None, True)),
        ({"interface": None, "reason": "eth1 or eth2"}, [f"{NO_INTERFACE} nodes"]),
        ({"ports": (port("mlx5_0", netdev="eth1", **ETHERNET),)}, [f"mlx5_0:1 {NO_GID}: give eth1 an address"]),
    ],
)
def test_what_is_odd_about_a_node_is_warned_of(facts: dict[str, Any], warnings: list[str]) -> None:
    environment = node(port("mlx5_0"), **facts)
    assert list(environment.warnings) == warnings
    names = [one.name for one in (*environment.variables, *environment.left_out) if "IFNAME" in one.name]
    both = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
    assert names == (both if environment.interface else [", ".join(both)])
