"""The group `ib`: every rule with the value that just passes and the one that just fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fabric_nodes import COMPUTE, FabricNode, lines, roce_gids
from testkit.check_fakes import Groups, changed_section, ended, only

from cluster.checks.finding import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.adapters import ipv4_of_gid, parse_adapters, roce_gid_index
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Section, UnreadableError
from engine.config.cluster import ClusterConfig, ExpectedHardware

GROUP = Groups("ib")

ONE = "mlx5_5"
OK, SKIP, FAIL, WARN, UNKNOWN = Verdict.OK, Verdict.SKIP, Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN
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
        node.ports[name] |= {"link_layer": "Ethernet", "netdev_mtu": 9000, **roce_gids(f"0a00:{index:04x}")}
    return node


def bare() -> FabricNode:
    node = FabricNode.healthy()
    return replace(node, ports={}, counters={}, gpus=node.gpus[:1])


def lose(node: FabricNode, *names: str) -> FabricNode:
    for name in names:
        del node.ports[name], node.counters[name]
    return node


def chosen(node: FabricNode, **expected: object) -> FabricView:
    return FabricView.of(NodeFacts(node.probe(), ClusterConfig(expected=ExpectedHardware(**expected))))


def test_a_healthy_node_is_ok_in_every_check(node: FabricNode):
    found = {finding.check: finding.severity for finding in node.check(hcas=8, hca_rate_gbps=400.0)}
    assert found == {**dict.fromkeys(GROUP.checks, OK), "ib.gid": SKIP}
    assert not roce(node).complaints()
    assert only(node.check(), "ib.gid").observed == "index 3"


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


def test_what_ranks_use_is_judged_wherever_it_sits_and_whatever_else_it_carries(node: FabricNode):
    node.ports[ONE]["default_route"] = True
    assert len(chosen(node).active) == 8  # without it GPUs would share
    node.ports["mlx5_9"] |= UP
    assert {one.device for one in chosen(node).active} == {*COMPUTE, "mlx5_9"} - {ONE}
    assert "carries the default route" in chosen(node).reasons[f"{ONE}:1"]
    assert not node.complaints()
    roce(node).ports = {ONE: node.ports[ONE]}
    assert [one.device for one in chosen(node).ports] == [ONE]


# One port of a healthy node.

STATE, RATE, MTU = (f"ib.{name} (mlx5_5:1): {{}}; expected: {{}}" for name in ("state", "rate", "mtu"))
UP_STATE = "ACTIVE, LinkUp"
NO_WIDTH = "UNKNOWN ib.pcie (mlx5_5): its PCIe width makes no sense or is not readable"
# What a healthy node says with these fields in one port.
ONE_PORT: list[tuple[Mapping[str, object], str]] = [
    (DOWN, "FAIL " + STATE.format("DOWN, Disabled", UP_STATE)),
    ({"state": "1: DOWN", "phys_state": "2: Polling"}, "FAIL " + STATE.format("DOWN, Polling", UP_STATE)),
    *(
        ({"state": f"{number}: {word}"}, "FAIL " + STATE.format(f"{word}, LinkUp", UP_STATE))
        for number, word in ((2, "INIT"), (3, "ARMED"), (5, "ACTIVE_DEFER"))
    ),
    ({"phys_state": "6: LinkErrorRecovery"}, "FAIL " + STATE.format("ACTIVE, LinkErrorRecovery", UP_STATE)),
    *(
        ({"state": text}, "UNKNOWN " + STATE.format("state not readable, LinkUp", UP_STATE))
        for text in ("", "?", "ACTIVE", "4 ACTIVE", "4:")
    ),
    *(
        ({"phys_state": text}, "UNKNOWN " + STATE.format("ACTIVE, physical state not readable", UP_STATE))
        for text in ("", "N/A", "LinkUp")
    ),
    # The rate of a port that is down does not count.
    ({**DOWN, "rate": "800 Gb/sec (4X XDR)"}, "FAIL " + STATE.format("DOWN, Disabled", UP_STATE)),
    ({"rate": "500 Gb/sec (4X)"}, ""),
    ({"rate": "399 Gb/sec (4X)"}, "FAIL " + RATE.format("399 Gb/s", "400 Gb/s")),
    ({"rate": "2.5 Gb/sec (1X SDR)"}, "FAIL " + RATE.format("2.5 Gb/s", "400 Gb/s")),
    *(
        ({"rate": text}, "UNKNOWN " + RATE.format("its rate is not readable", "400 Gb/s"))
        for text in ("", "fast", "1e9 Gb/sec", "4")
    ),
    ({"netdev_mtu": 2044}, "WARN " + MTU.format("ib3: 2044", 4092)),
    *(({"netdev_mtu": text}, "UNKNOWN " + MTU.format("ib3: MTU not readable", 4092)) for text in ("", "N/A")),
    ({"netdev": ""}, ""),
    ({"current_link_width": 8}, "FAIL ib.pcie (mlx5_5): x8 at 32 GT/s; expected: x16"),
    ({"current_link_width": 8, "current_link_speed": ""}, "FAIL ib.pcie (mlx5_5): x8; expected: x16"),
    ({"max_link_width": 4}, NO_WIDTH),
    *(({"current_link_width": text}, NO_WIDTH) for text in (15, "", "0", "63", "255", "Unknown", "-16")),
    (GEN4, "FAIL ib.pcie (mlx5_5): x16 at 16 GT/s carries 252 Gb/s; expected: 400 Gb/s, as its port"),
    *(
        (
            {"current_link_speed": text},
            "UNKNOWN ib.pcie (mlx5_5): the speed of its PCIe lanes is not readable; expected: x16",
        )
        for text in ("", "Unknown")
    ),
]


@pytest.mark.parametrize(("changes", "expected"), ONE_PORT)
def test_one_port_decides(node: FabricNode, changes: Mapping[str, object], expected: str):
    node.ports[ONE] |= changes
    assert node.told() == [expected] * bool(expected)


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


def test_the_usual_rate_is_that_of_ports_that_are_up(node: FabricNode):
    for name in COMPUTE[:5]:
        node.ports[name] |= {"state": "1: DOWN", "rate": "40 Gb/sec (4X QDR)"}
    assert chosen(node).rate_gbps == 400.0


def test_pcie_lanes_and_speed(node: FabricNode):
    node.all_compute(**HDR, **GEN4)  # a slower slot that carries the port
    assert not node.complaints()
    node.ports[ONE]["current_link_width"] = 12  # missing lanes fail though they would do
    assert node.complaints() == [("ib.pcie", ONE, FAIL)]
    node.all_compute(current_link_width="", max_link_width="")  # as virtual machines are
    assert only(node.check(), "ib.pcie").severity is SKIP


NO_GID = "FAIL ib.gid (mlx5_5:1): no GID of RoCE v2 over IPv4"
OTHERS = ", ".join(f"{name}:1" for name in COMPUTE if name != ONE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"netdev_mtu": 2044}, "FAIL ib.mtu (mlx5_5:1): ib3: 2044; expected: 9000"),
        ({"gid.3": ""}, NO_GID),
        ({"gid.3": "0000:0000:0000:0000:0000:ffff:0a00:0001 "}, NO_GID),  # no readable type
        (
            {"gid.3": "", **roce_gids("0a00:0009", first=4)},
            f"WARN ib.gid: index 3: {OTHERS}; index 7: mlx5_5:1",
        ),
    ],
)
def test_one_roce_port_decides(node: FabricNode, changes: Mapping[str, object], expected: str):
    roce(node).ports[ONE] |= changes
    assert node.told() == [expected]


@pytest.mark.parametrize(("mtu", "bad"), [(9000, False), (4200, False), (4199, True), (1500, True)])
def test_roce_wants_an_mtu_for_its_packets(node: FabricNode, mtu: int, bad: bool):
    roce(node).all_compute(netdev_mtu=mtu)
    text = f"WARN ib.mtu: {mtu} on all: packets of RoCE are cut to 1024 bytes or less; expected: at least 4200"
    assert node.told() == [text] * bad


def test_ports_without_ip_need_no_mtu(node: FabricNode):
    node.all_compute(netdev="")
    found = only(node.check(), "ib.mtu")
    assert (found.severity, found.observed) == (SKIP, "no port carries IP")


# How many there are.


def test_ports_are_counted(node: FabricNode):
    spare, down = (f"FAIL ib.state ({name}:1): DOWN, Disabled; expected: ACTIVE, LinkUp" for name in ("mlx5_9", ONE))
    count = "FAIL ib.count: {} ports for training are up; expected: {} (cluster.expected.hcas)"
    assert node.told(hcas=9) == [count.format("8 of 9", 9), spare]
    assert not node.told(hcas=8)
    node.ports[ONE] |= DOWN
    assert node.told(hcas=8) == [count.format("7 of 8", 8), down]
    assert node.told() == [down]
    node.ports["mlx5_9"] |= UP  # which ranks then use
    assert node.told(hcas=8) == [down]
    node.gpus = []  # nobody knows which ports ought to be up, but how many
    assert not node.told(hcas=8)


def test_a_lost_adapter_is_missed_beside_its_gpu(node: FabricNode):
    text = "FAIL ib.count (GPU at 0000:61:00.0): no adapter is beside this GPU, while the others have one"
    assert lose(node, ONE).told() == [text]


def test_where_many_gpus_have_no_adapter_that_is_how_the_node_is_built(node: FabricNode):
    assert not lose(node, *COMPUTE[:4], "mlx5_9").complaints()


def test_adapters_without_driver_or_ports_are_told_one_by_one(node: FabricNode):
    paths = [str(node.ports[name]["path"]) for name in COMPUTE[:3]]
    node.others = [*(("driverless", {"path": path}) for path in paths), ("portless", {"dev": "mlx5_30"})]
    expected = [*(path[-12:] for path in paths), "mlx5_30"]
    assert lose(node, *COMPUTE[:3]).complaints() == [("ib.count", device, FAIL) for device in expected]
    nothing_else = bare()
    nothing_else.gpus, nothing_else.others = [], [("driverless", {"path": "/sys/devices"})]
    assert ("ib.count", "an unknown address", FAIL) in nothing_else.complaints()


def test_a_node_without_adapters_is_skipped_unless_they_are_expected():
    node = bare()
    assert {one.check: one.severity for one in node.check()} == dict.fromkeys(GROUP.checks, SKIP)
    assert node.told(hcas=8)[0] == "FAIL ib.count: 0 ports for training are up; expected: 8 (cluster.expected.hcas)"
    changes = {"link_layer": "Ethernet", "netdev": "eth0", "default_route": True, **DOWN}
    node.ports["mlx5_0"] = FabricNode.healthy().ports["mlx5_0"] | changes
    reason = "its link is not up: state DOWN, Disabled"
    assert {one.observed for one in node.check()} == {f"no adapter for training: mlx5_0:1 {reason}"}


def test_one_good_port_or_none_does_not_make_a_good_node(node: FabricNode):
    for name in set(COMPUTE) - {ONE}:
        node.ports[name] |= DOWN
    assert len(node.complaints()) == 7
    node.all_compute(**DOWN)
    good = {one.check for one in node.check() if one.severity is OK}
    assert good == {*GROUP.checks} - {"ib.count", "ib.state"}  # of mlx5_3


# Nodes together.


def test_traits_are_what_all_nodes_must_have_alike(node: FabricNode):
    told = {"ib.link_layer": "InfiniBand", "ib.mtu": "4092", "ib.rate": "400"}
    assert GROUP.traits(node.probe(), ClusterConfig()) == {**told, "ib.count": "8"}
    assert GROUP.traits(node.probe(), ClusterConfig(expected=ExpectedHardware(hcas=8))) == told
    node.ports[ONE]["netdev_mtu"] = ""  # what one port does not tell is left out
    assert "ib.mtu" not in GROUP.traits(node.probe(), ClusterConfig())
    assert GROUP.traits(changed_section(node.probe(), "ib.ports", exit_code=1), ClusterConfig()) == {}
    assert GROUP.traits(bare().probe(), ClusterConfig()) == {"ib.count": "0"}


# From the lines of the probe to values.


def ports_section(*fields: Mapping[str, object]) -> Section:
    whole = FabricNode.healthy().ports["mlx5_0"]
    return ended("ib.ports", lines([("port", whole | one) for one in fields]))


def one_port(**changes: object):
    return parse_adapters(ports_section(changes)).ports[0]


def test_a_port_has_all_that_the_probe_told():
    found = one_port(link_layer="a%25b")
    assert found.pci_path == ("0000:15:01.0", "0000:16:00.0", "0000:17:08.0", "0000:18:00.0")
    assert (found.netdev, found.netdev_is_up, found.netdev_mtu, found.numa_node) == ("ib0", True, 4092, 0)
    assert (found.is_bond, found.is_virtual_function, found.has_default_route) == (False, False, False)
    assert found.link_layer == "a%25b"
    assert one_port(dev="mlx5_bond_0").is_bond


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(([{"dev": name}], "no name") for name in ("", "../x", "a b", "x" * 65, "$(id)")),
        ([{}, {}], "twice"),
        ([{"port": "x"}], "no number"),
    ],
)
def test_hostile_ports_are_unreadable(fields: list[Mapping[str, object]], words: str):
    with pytest.raises(UnreadableError, match=words):
        parse_adapters(ports_section(*fields))


def test_the_gid_index_is_that_of_roce_v2_over_ipv4():
    garbage = {"gid.0": "garbage RoCE v2", "gid.x": roce_gids("0a00:0001")["gid.3"], "gid.1": ""}
    assert sorted(one_port(**garbage, **roce_gids("0a00:0001", 2)).gids) == [2, 3, 4, 5]
    assert roce_gid_index(one_port(**roce_gids("0a00:0001", first=8))) == 11
    assert roce_gid_index(one_port(**roce_gids("0a00:0001"), **roce_gids("0a00:0002", first=4))) == 3
    assert roce_gid_index(one_port()) is None
    assert ipv4_of_gid("0000:0000:0000:0000:0000:ffff:0a01:02ff") == "10.1.2.255"
    assert ipv4_of_gid("0000:0000:0000:0000:0000:ffff:0a01:zzzz") is None
