"""Which ports are kept, and why: `+` kept with a remark, `-` dropped, `!` a warning."""

from __future__ import annotations

from typing import Any

import pytest
from env_topologies import node, port

from cluster.env.facts import StorageRoute
from cluster.survey.adapters import HcaPort
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig, ExpectedHardware

GOOD = port("mlx5_0", netdev="ib0")
ETHERNET = {"link_layer": "Ethernet"}
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


def storage(way: str, **facts: Any) -> dict[str, Any]:
    return {"storage": (StorageRoute("/data", "10.9.0.5", way),), **facts}


def expected(**hardware: Any) -> dict[str, Any]:
    return {"config": ClusterConfig(expected=ExpectedHardware(**hardware))}


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
        (
            {"netdev": "ib2", "ways": ("ib2", "bond0")},
            storage("bond0"),
            f"its interface ib2 (as part of bond0) {TO_STORAGE}",
        ),
        (
            {"netdev": "eth2", "ways": ("eth2", "bond0", "vlan7"), "default_route": "vlan7"},
            {},
            "its interface eth2 (as part of vlan7) carries the default route",
        ),
    ],
)
def test_an_odd_port_beside_a_good_one_is_dropped_and_told_why(
    fields: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    assert told(GOOD, port("mlx5_1", **fields), **facts) == ["0:1", f"- mlx5_1:1: {reason}"]


def many(count: int, **fields: Any) -> list[HcaPort]:
    return [port(f"mlx5_{index}", netdev=f"ib{index}", **fields) for index in range(count)]


EIGHT = {"gpus": tuple(GpuAddress(index) for index in range(8))}
ROCE = port("mlx5_0", netdev="eth0", default_route="eth0", rate_gbps=100.0, **ETHERNET)
BOND, SLOW = port("mlx5_8", is_bond=True, **ETHERNET), port("mlx5_9", rate_gbps=25.0, **ETHERNET)
SOME = [port("mlx5_1", rate_gbps=200.0), port("mlx5_2", rate_gbps=100.0)]
NO_OTHER = "but the node has no other port as fast"


@pytest.mark.parametrize(
    ("ports", "facts", "kept", "words"),
    [
        # The link layer with most bandwidth, neither that of one fast port nor InfiniBand for storage.
        ([*many(4, rate_gbps=200.0), port("mlx5_4", **ETHERNET)], {}, "0 1 2 3", f"{MOST} InfiniBand (4 ports, 800"),
        (
            [*many(3, **ETHERNET), port("mlx5_8"), port("mlx5_9", rate_gbps=1.0)],
            {},
            "0 1 2",
            f"{MOST} Ethernet (3 ports",
        ),
        # A virtual machine, and a network that is built of bonds.
        (many(1, is_virtual_function=True), {}, "0", "; a virtual function, but the node has nothing else"),
        ([BOND, SLOW], {}, "8", "; a bond, as most of the network of this node"),
        # What carries other traffic stays where ranks would lose by it: nothing as fast is left, or GPUs share more.
        ([GOOD], storage("ib0"), "0", f"! mlx5_0:1 is used for the ranks: its interface ib0 {TO_STORAGE}, {NO_OTHER}"),
        (
            [ROCE, SLOW],
            {},
            "0",
            f"! mlx5_0:1 is used for the ranks: its interface eth0 carries the default route, {NO_OTHER}",
        ),
        (many(8), storage("ib0", **EIGHT), "0 1 2 3 4 5 6 7", "but without it 8 GPUs would share 7 ports"),
        (many(9), storage("ib0", **EIGHT), "1 2 3 4 5 6 7 8", f"- mlx5_0:1: its interface ib0 {TO_STORAGE}"),
        (many(5), storage("ib0", **EIGHT), "1 2 3 4", f"- mlx5_0:1: its interface ib0 {TO_STORAGE}"),
        # What is expected brings back what storage shares, without a warning, is the floor, or is missed.
        (many(2), storage("ib1", **expected(hcas=2)), "0 1", f"{TO_STORAGE}, but cluster.expected.hcas=2 counts it"),
        ([GOOD], expected(hcas=8), "0", "! 1 ports kept, cluster.expected.hcas=8"),
        (
            [GOOD, *SOME],
            expected(hca_rate_gbps=200.0),
            "0 1",
            "slower than cluster.expected.hca_rate_gbps is 200 Gbit/s",
        ),
        (
            SOME,
            expected(hca_rate_gbps=400.0),
            "1",
            "! no port reaches cluster.expected.hca_rate_gbps=400; the fastest have 200",
        ),
        # Both ports of an adapter are judged by themselves; people count 9, 10.
        (
            [port("mlx5_10"), HcaPort("mlx5_9", 2, "InfiniBand", "DOWN", ""), port("mlx5_9")],
            {},
            "9 10",
            "- mlx5_9:2: its link",
        ),
    ],
)
def test_ports_of_a_node(ports: list[HcaPort], facts: dict[str, Any], kept: str, words: str) -> None:
    found, *lines = told(*ports, **facts)
    assert found == " ".join(f"{number}:1" for number in kept.split())
    assert words in "\n".join(lines)
    is_forced = "but without" in words or NO_OTHER in words
    assert is_forced == any("is used for the ranks" in line for line in lines)
