"""The group `ib`: every rule with the value that just passes and the one that just fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fabric_nodes import COMPUTE, FabricNode, roce_gids
from testkit.check_fakes import Groups, changed_section, ended, only

from cluster.checks.finding import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.adapters import parse_adapters, roce_gid_index
from cluster.survey.facts import NodeFacts
from cluster.survey.section import UnreadableError
from engine.config.cluster import ClusterConfig, ExpectedHardware
from engine.runs.records import json_text

GROUP = Groups("ib")

ONE = "mlx5_5"
OK, SKIP, FAIL, UNKNOWN = Verdict.OK, Verdict.SKIP, Verdict.FAIL, Verdict.UNKNOWN
DOWN = {"state": "1: DOWN", "phys_state": "3: Disabled"}
UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
HDR = {"rate": "200 Gb/sec (4X HDR)"}
GEN4 = {"current_link_speed": "16.0 GT/s PCIe"}


@pytest.fixture
def node() -> FabricNode:
    return FabricNode.healthy()


def roce(node: FabricNode) -> FabricNode:
    """`node` with Ethernet as its network for training."""
    for index, name in enumerate(COMPUTE):
        node.ports[name] |= {"link_layer": "Ethernet", "mtu": "9000", **roce_gids(f"0a00:{index:04x}")}
    return node


def bare() -> FabricNode:
    node = FabricNode.healthy()
    return replace(node, ports={}, gpus=node.gpus[:1])


def chosen(node: FabricNode, **expected: object) -> FabricView:
    return FabricView.of(NodeFacts(node.probe(), ClusterConfig(expected=ExpectedHardware(**expected))))


def test_a_healthy_node_is_ok_in_every_check(node: FabricNode):
    found = {finding.check: finding.severity for finding in node.check(hcas=8, hca_rate_gbps=400.0)}
    assert found == {**dict.fromkeys(GROUP.checks, OK), "ib.gid": SKIP, "ib.mtu": SKIP}
    assert not roce(node).complaints()
    assert only(node.check(), "ib.gid").severity is OK


# Which ports are for training.


def test_ports_that_are_left_out_have_a_reason(node: FabricNode):
    node.ports["mlx5_20"] = {**node.ports["mlx5_0"], "dev": "mlx5_20", "physfn": True}
    found = chosen(node)
    assert [one.device for one in found.ports] == list(COMPUTE)
    assert found.reasons == {
        "mlx5_3:1": "its link layer is Ethernet; most bandwidth of the node is InfiniBand (8 ports, 3200 Gbit/s)",
        "mlx5_9:1": "its link is not up: state DOWN, Disabled",
        "mlx5_20:1": "a virtual function",
        "mlx5_bond_0:1": "a bond of several ports",
    }
    assert "mlx5_9:1: its link is not up" in only(node.check(), "ib.count").evidence


def test_without_gpus_every_port_counts_that_no_configuration_excuses(node: FabricNode):
    node.gpus = []
    assert node.complaints() == [("ib.state", "mlx5_9:1", FAIL)]
    assert not node.complaints(hcas=8)
    node.ports["mlx5_9"] |= {"link_layer": "Ethernet"}  # not what ranks use
    assert not node.complaints()


def test_what_ranks_use_is_judged_wherever_it_sits_and_whatever_else_it_carries(node: FabricNode):
    node.ports[ONE]["default_route"] = node.ports[ONE]["netdev"]
    assert len(chosen(node).active) == 8  # without it GPUs would share
    node.ports["mlx5_9"] |= UP
    assert {one.device for one in chosen(node).active} == {*COMPUTE, "mlx5_9"} - {ONE}
    assert "carries the default route" in chosen(node).reasons[f"{ONE}:1"]
    assert not node.complaints()


# One port of a healthy node.

STATE, RATE = (f"ib.{name} (mlx5_5:1): {{}}; expected: {{}}" for name in ("state", "rate"))
UP_STATE = "ACTIVE, LinkUp"
NO_WIDTH = "UNKNOWN ib.pcie (mlx5_5): its PCIe width makes no sense or is not readable"
COUNTED = "FAIL ib.counters (mlx5_5:1): errors are being counted: {}"
# What a healthy node says with these fields in one port.
ONE_PORT: list[tuple[Mapping[str, Any], str]] = [
    (DOWN, "FAIL " + STATE.format("DOWN, Disabled", UP_STATE)),
    ({"state": "1: DOWN", "phys_state": "2: Polling"}, "FAIL " + STATE.format("DOWN, Polling", UP_STATE)),
    ({"state": "2: INIT"}, "FAIL " + STATE.format("INIT, LinkUp", UP_STATE)),
    ({"phys_state": "6: LinkErrorRecovery"}, "FAIL " + STATE.format("ACTIVE, LinkErrorRecovery", UP_STATE)),
    *(
        ({"state": text}, "UNKNOWN " + STATE.format("state not readable, LinkUp", UP_STATE))
        for text in ("", "ACTIVE", "4:")
    ),
    ({"phys_state": "N/A"}, "UNKNOWN " + STATE.format("ACTIVE, physical state not readable", UP_STATE)),
    # The rate of a port that is down does not count.
    ({**DOWN, "rate": "800 Gb/sec (4X XDR)"}, "FAIL " + STATE.format("DOWN, Disabled", UP_STATE)),
    ({"rate": "399 Gb/sec (4X)"}, "FAIL " + RATE.format("399 Gb/s", "400 Gb/s")),
    *(
        ({"rate": text}, "UNKNOWN " + RATE.format("its rate is not readable", "400 Gb/s"))
        for text in ("", "fast", "1e9 Gb/sec")
    ),
    ({"current_link_width": "8"}, "FAIL ib.pcie (mlx5_5): x8 at 32 GT/s; expected: x16"),
    ({"current_link_width": "8", "current_link_speed": ""}, "FAIL ib.pcie (mlx5_5): x8; expected: x16"),
    ({"max_link_width": "4"}, NO_WIDTH),
    *(({"current_link_width": text}, NO_WIDTH) for text in ("15", "", "0", "63", "255", "-16")),
    (GEN4, "FAIL ib.pcie (mlx5_5): x16 at 16 GT/s carries 252 Gb/s; expected: 400 Gb/s, as its port"),
    (
        {"current_link_speed": "Unknown"},
        "UNKNOWN ib.pcie (mlx5_5): the speed of its PCIe lanes is not readable; expected: x16",
    ),
    ({"grown": {"link_downed": 0, "symbol_error": 2}}, COUNTED.format("symbol_error +2")),
    ({"grown": {"link_downed": 3, "symbol_error": 1}}, COUNTED.format("link_downed +3, symbol_error +1")),
    ({"grown": {"symbol_error": 0}}, "UNKNOWN ib.counters (mlx5_5:1): its error counters are not readable"),
]


@pytest.mark.parametrize(("changes", "expected"), ONE_PORT)
def test_one_port_decides(node: FabricNode, changes: Mapping[str, Any], expected: str):
    node.ports[ONE] |= changes
    assert node.told() == [expected]


def test_a_port_without_subnet_manager_says_so(node: FabricNode):
    node.ports[ONE] |= {"state": "2: INIT"}
    found = only([one for one in node.check() if one.device], "ib.state")
    assert "subnet manager" in found.remedy
    assert found.evidence == "state INIT, phys_state LinkUp, rate 400.0 Gb/s, InfiniBand, 0000:5e:00.0"


def test_rates_against_the_configuration_and_each_other(node: FabricNode):
    def slow(*names: str) -> list[str]:
        return [f"FAIL ib.rate ({name}:1): 200 Gb/s; expected: 400 Gb/s" for name in names]

    for name in COMPUTE[:4]:  # of two rates that as many ports have the higher is right
        node.ports[name] |= HDR
    assert node.told() == slow(*COMPUTE[:4])
    node.all_compute(**HDR)
    assert node.told(hca_rate_gbps=400.0) == slow(*COMPUTE)
    assert not node.told(hca_rate_gbps=200.0)


def test_pcie_lanes_and_speed(node: FabricNode):
    node.all_compute(**HDR, **GEN4)  # a slower slot that carries the port
    assert not node.complaints()
    node.ports[ONE]["current_link_width"] = "12"  # missing lanes fail though they would do
    assert node.complaints() == [("ib.pcie", ONE, FAIL)]
    node.all_compute(current_link_width="", max_link_width="")  # as virtual machines are
    assert only(node.check(), "ib.pcie").severity is SKIP


@pytest.mark.parametrize("gid", [["RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001"], ["RoCE v2", "garbage"]])
def test_a_roce_port_without_a_gid_fails(node: FabricNode, gid: list[str]):
    roce(node).ports[ONE]["gids"] = {"3": gid}
    assert node.told() == ["FAIL ib.gid (mlx5_5:1): no GID of RoCE v2 over IPv4"]


ONE_MTU, ALL = (
    "ib.mtu (mlx5_5:1): {}; expected: 9000",
    "ib.mtu ({}:1): 4199: packets of RoCE are cut to 1024 bytes or less",
)


@pytest.mark.parametrize(
    ("all_mtu", "mtu", "expected"),
    [
        ("9000", "2044", ["FAIL " + ONE_MTU.format("2044")]),
        ("9000", "", ["UNKNOWN ib.mtu (mlx5_5:1): not readable"]),
        ("4200", "4200", []),
        ("4199", "4199", [f"WARN {ALL.format(name)}; expected: at least 4200" for name in COMPUTE]),
    ],
)
def test_roce_wants_one_mtu_for_its_packets(node: FabricNode, all_mtu: str, mtu: str, expected: list[str]):
    roce(node).all_compute(mtu=all_mtu)
    node.ports[ONE]["mtu"] = mtu
    assert sorted(node.told()) == sorted(expected)
    traits = GROUP.traits(node.probe(), ClusterConfig())
    assert traits.get("ib.mtu") == (", ".join(sorted({mtu, all_mtu})) if mtu else None)


# How many there are.


def test_ports_are_counted(node: FabricNode):
    spare, down = (f"FAIL ib.state ({name}:1): DOWN, Disabled; expected: ACTIVE, LinkUp" for name in ("mlx5_9", ONE))
    count = "FAIL ib.count: {} ports for training are up; expected: {} (cluster.expected.hcas)"
    assert node.told(hcas=9) == [count.format("8", 9)]
    assert not node.told(hcas=8)
    node.ports[ONE] |= DOWN
    assert node.told(hcas=8) == [count.format("7 of 8", 8), down]
    assert node.told() == [down]
    node.ports["mlx5_9"] |= UP  # which ranks then use
    assert not node.told(hcas=8)
    node.gpus, node.ports["mlx5_9"] = [], node.ports["mlx5_9"] | DOWN
    assert sorted(node.told()) == sorted([spare, down])


def test_broken_adapters_are_told_one_by_one(node: FabricNode):
    node.broken = {"0000:5e:00.0": "the InfiniBand adapter has no driver", "mlx5_30": "the adapter shows no port"}
    assert node.complaints() == [("ib.count", device, FAIL) for device in node.broken]
    nothing_else = bare()
    nothing_else.broken = node.broken
    assert ("ib.count", "mlx5_30", FAIL) in nothing_else.complaints()


def test_a_node_without_adapters_is_skipped_unless_they_are_expected():
    node = bare()
    assert {one.check: one.severity for one in node.check()} == dict.fromkeys(GROUP.checks, SKIP)
    assert node.told(hcas=8)[0] == "FAIL ib.count: 0 ports for training are up; expected: 8 (cluster.expected.hcas)"
    changes = {"link_layer": "Ethernet", "netdev": "eth0", "default_route": "eth0", **DOWN}
    node.ports["mlx5_0"] = FabricNode.healthy().ports["mlx5_0"] | changes
    reason = "its link is not up: state DOWN, Disabled"
    assert {one.observed for one in node.check()} == {f"no adapter for training: mlx5_0:1 {reason}"}


def test_one_good_port_or_none_does_not_make_a_good_node(node: FabricNode):
    for name in set(COMPUTE) - {ONE}:
        node.ports[name] |= DOWN
    assert len(node.complaints()) == 7
    node.all_compute(**DOWN)
    assert {device for check, device, _ in node.complaints() if check == "ib.state"} == {f"{one}:1" for one in COMPUTE}


def test_traits_are_what_all_nodes_must_have_alike(node: FabricNode):
    told = {"ib.link_layer": "InfiniBand", "ib.rate": "400"}
    assert GROUP.traits(node.probe(), ClusterConfig()) == {**told, "ib.count": "8"}
    assert GROUP.traits(node.probe(), ClusterConfig(expected=ExpectedHardware(hcas=8))) == told
    assert GROUP.traits(changed_section(node.probe(), "ib.ports", exit_code=1), ClusterConfig()) == {}
    assert GROUP.traits(bare().probe(), ClusterConfig()) == {"ib.count": "0"}


# Over time, and on the way to GPU memory.

LOST = "ib.log (mlx5_5): its link was lost {}, the last {} ago"


@pytest.mark.parametrize(
    ("count", "said", "expected"),
    [
        (1, "[  899000.0] mlx5_core {}: ib3: Link down", ["WARN " + LOST.format("1 time within a day", "17 min")]),
        (3, "[  899940.0] mlx5_core {}: ib3: Link down", ["FAIL " + LOST.format("3 times within a day", "60 s")]),
        (3, "[  813599.0] mlx5_core {}: ib3: Link down", ["WARN " + LOST.format("3 times since boot", "24.0 h")]),
        (
            3,
            "[  900001.0] mlx5_core {}: ib3: Link down",
            ["FAIL " + LOST.format("3 times within a day", "0 s")],
        ),  # later than now
        (3, "mlx5_core {}: ib3: Link down", ["FAIL " + LOST.format("3 times within a day", "0 s")]),  # without a time
        (
            2,
            "[  899000.0] mlx5_core {}: poll_health:830: device's health compromised - reached miss",
            ["FAIL ib.log (mlx5_5): its firmware failed 2 times within a day, the last 17 min ago"],
        ),
    ],
)
def test_the_kernel_log_tells_of_links_and_firmware(node: FabricNode, count: int, said: str, expected: list[str]):
    node.kernel = [(count, said.format("0000:5e:00.0"))]
    assert node.told() == expected
    node.kernel = [(count, said.format("0000:e1:00.0"))]
    assert not node.told()  # of a port that is not for training


def test_without_places_on_the_bus_nobody_knows_whose_lines_matter(node: FabricNode):
    node.all_compute(path="")
    assert [check for check, _, _ in node.complaints(hcas=8)] == ["ib.log"]


def test_a_kernel_log_that_may_not_be_read_is_not_a_quiet_one(node: FabricNode):
    denied = changed_section(node.probe(), "kernel.log", output="dmesg: Operation not permitted", exit_code=1)
    found = only(GROUP.check(denied, ClusterConfig()), "ib.log")
    assert (found.severity, found.evidence) == (UNKNOWN, "dmesg: Operation not permitted")
    assert "kernel.dmesg_restrict" in found.remedy


def test_virtual_functions_tell_no_counters(node: FabricNode):
    node.all_compute(physfn=True, grown={})
    node.ports = {name: node.ports[name] for name in COMPUTE}
    assert not node.complaints()


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15"
PEERS = ["/sys/module/nvidia_peermem/version"]
NO_WAY = (FAIL, "adapters cannot reach GPU memory")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"peers": PEERS}, (OK, PEERS[0])),
        ({"driver": OPEN, "dmabuf": True}, (OK, "DMA-BUF")),
        ({"driver": OPEN}, NO_WAY),
        ({"driver": OPEN, "dmabuf": "odd"}, NO_WAY),
        (
            {"driver": OPEN, "dmabuf": None},
            (UNKNOWN, "no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read"),
        ),
        ({"driver": CLOSED, "dmabuf": True}, NO_WAY),
        ({"module": False}, NO_WAY),
    ],
)
def test_adapters_must_reach_gpu_memory(node: FabricNode, told: Mapping[str, object], expected: tuple[Verdict, str]):
    node.gpudirect |= {"peers": [], "driver": "", "dmabuf": False, **told}
    found = only(node.check(), "ib.gpudirect")
    assert (found.severity, found.observed) == expected
    node.gpus, node.gpudirect = [], {"peers": [], "driver": "", "module": False, "dmabuf": None}
    assert only(node.check(), "ib.gpudirect").severity is SKIP  # a node without GPUs


# From the answer to values.


def one_port(**changes: Any):
    row = FabricNode.healthy().ports["mlx5_0"] | changes
    return parse_adapters(ended("ib.ports", json_text({"ports": [row], "broken": {}}))).ports[0]


def test_a_port_has_all_that_the_probe_told():
    found = one_port(link_layer="a%25b")
    assert found.pci_path == ("0000:15:01.0", "0000:16:00.0", "0000:17:08.0", "0000:18:00.0")
    assert (found.netdev, found.numa_node, found.link_layer) == ("ib0", 0, "a%25b")
    assert (found.is_bond, found.is_virtual_function, found.ways, found.default_route) == (False, False, ("ib0",), "")
    assert one_port(dev="mlx5_bond_0").is_bond


@pytest.mark.parametrize(
    "changes", [*({"dev": name} for name in ("", "../x", "a b", "x" * 65, "$(id)")), {"port": "x"}, {"port": None}]
)
def test_hostile_ports_are_unreadable(node: FabricNode, changes: Mapping[str, Any]):
    for row in (node.ports["mlx5_0"] | changes, node.ports[ONE]):  # or one that comes twice
        told = json_text({"ports": [row, node.ports[ONE]], "broken": {}})
        with pytest.raises(UnreadableError):
            parse_adapters(ended("ib.ports", told))


def test_the_gid_index_is_that_of_roce_v2_over_ipv4():
    assert roce_gid_index(one_port(**roce_gids("0a00:0001", first=8))) == 11
    assert roce_gid_index(one_port()) is None
    assert roce_gid_index(one_port(gids={"0": ["RoCE v2", "0000:0000:0000:0000:0000:ffff:0a01:zzzz"]})) is None
