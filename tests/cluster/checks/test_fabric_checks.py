"""The group `ib`: every rule with the value that just passes and the one that just fails."""

from __future__ import annotations

import pytest
from fabric_nodes import COMPUTE, FabricNode, complaints, damaged, of, port, roce_gids, switch

from cluster.checks.finding import Verdict
from cluster.checks.ib import GROUP
from cluster.checks.ib_ports import FabricView
from cluster.checks.profile import profile_findings
from cluster.probe.section import SectionState
from engine.config_cluster import ClusterConfig, ExpectedHardware

CHECKS = {
    *("ib.count", "ib.state", "ib.rate", "ib.mtu", "ib.pcie", "ib.gid"),
    *("ib.counters", "ib.flaps", "ib.health", "ib.gpudirect"),
}
ONE = "mlx5_5"
FAIL, WARN, UNKNOWN = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN


@pytest.fixture
def node() -> FabricNode:
    return FabricNode.healthy()


def roce(node: FabricNode) -> FabricNode:
    """`node` with Ethernet as its network for training."""
    for index, name in enumerate(COMPUTE):
        node.ports[name] |= {"link_layer": "Ethernet", "netdev_mtu": 9000, **roce_gids(f"0a00:{index:04x}")}
    return node


def chosen(node: FabricNode, **expected: object):
    return FabricView.of(node.probe(), ClusterConfig(expected=ExpectedHardware(**expected)))


def test_a_healthy_node_is_ok_in_every_check(node: FabricNode):
    findings = node.check(hcas=8, hca_rate_gbps=400.0)
    found = {finding.check: finding.severity for finding in findings}
    assert found == {**dict.fromkeys(CHECKS, Verdict.OK), "ib.gid": Verdict.SKIP}


def test_ports_that_are_left_out_have_a_reason(node: FabricNode):
    found = chosen(node)
    assert [one.device for one in found.ports] == list(COMPUTE)
    assert found.reasons == {
        "mlx5_3:1": "speaks Ethernet, the ports for training InfiniBand",
        "mlx5_4:1": "not beside a GPU",
        "mlx5_bond_0:1": "bond0 carries the default route",
    }
    assert "mlx5_4:1: not beside a GPU" in of(node.check(), "ib.count").evidence


def test_virtual_functions_are_left_out(node: FabricNode):
    node.ports["mlx5_20"] = port("mlx5_20", 0, physfn=1)
    assert chosen(node).reasons["mlx5_20:1"] == "a virtual function"


def test_a_machine_with_nothing_but_virtual_functions_uses_them(node: FabricNode):
    node.all_compute(physfn=1)
    node.ports = {name: node.ports[name] for name in COMPUTE}
    assert len(chosen(node).active) == 8


def test_a_network_built_of_bonds_is_used(node: FabricNode):
    roce(node).all_compute(bonded=1)
    assert len(chosen(node).active) == 8
    assert not node.complaints()


def test_without_gpus_every_port_counts_that_no_configuration_excuses(node: FabricNode):
    node.gpus = []
    assert node.complaints() == [("ib.state", "mlx5_4:1", FAIL)]
    assert chosen(node, hcas=8).reasons["mlx5_4:1"] == "down, while 8 others are up as cluster.expected.hcas says"
    assert not node.complaints(hcas=8)


def test_more_configured_ports_than_there_are_beside_gpus_take_the_others_in(node: FabricNode):
    node.ports["mlx5_4"] |= {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    assert len(chosen(node, hcas=9).active) == 9
    assert len(chosen(node, hcas=8).active) == 8


def test_infiniband_may_carry_the_default_route(node: FabricNode):
    node.ports[ONE]["default_route"] = 1
    assert len(chosen(node).ports) == 8


def test_the_only_network_counts_where_the_configuration_says_so(node: FabricNode):
    roce(node)
    node.ports = {ONE: {**node.ports[ONE], "default_route": 1}}
    assert chosen(node).ports == ()
    assert [one.device for one in chosen(node, hcas=1).ports] == [ONE]


def test_second_ports_of_another_kind_are_left_out_while_they_are_down(node: FabricNode):
    for name in COMPUTE:
        down = {"dev": f"{name}_b", "state": "1: DOWN", "phys_state": "3: Disabled"}
        node.ports[f"{name}_b"] = {**node.ports[name], **down}
    roce(node)
    assert {one.link_layer for one in chosen(node).ports} == {"Ethernet"}
    assert len(chosen(node).active) == 8


def test_the_usual_rate_is_that_of_ports_that_are_up(node: FabricNode):
    for name in COMPUTE[:5]:
        node.ports[name] |= {"state": "1: DOWN", "rate": "40 Gb/sec (4X QDR)"}
    assert chosen(node).rate_gbps == 400.0


@pytest.mark.parametrize(
    ("state", "phys_state", "severity"),
    [
        ("1: DOWN", "3: Disabled", FAIL),
        ("1: DOWN", "2: Polling", FAIL),
        ("2: INIT", "5: LinkUp", FAIL),
        ("3: ARMED", "5: LinkUp", FAIL),
        ("4: ACTIVE", "6: LinkErrorRecovery", FAIL),
        ("", "5: LinkUp", UNKNOWN),
        ("4: ACTIVE", "", UNKNOWN),
    ],
)
def test_a_port_must_be_active_with_its_link_up(node: FabricNode, state: str, phys_state: str, severity: Verdict):
    node.ports[ONE] |= {"state": state, "phys_state": phys_state}
    assert node.complaints() == [("ib.state", f"{ONE}:1", severity)]


def test_a_port_without_subnet_manager_says_so(node: FabricNode):
    node.ports[ONE] |= {"state": "2: INIT"}
    assert "subnet manager" in of([f for f in node.check() if f.device], "ib.state").remedy


def test_one_port_less_than_configured_fails(node: FabricNode):
    assert ("ib.count", None, FAIL) in node.complaints(hcas=9)
    assert not node.complaints(hcas=8)


@pytest.mark.parametrize(("rate", "bad"), [(400, False), (399, True), (200, True), (500, False)])
def test_a_port_slower_than_most_fails(node: FabricNode, rate: int, bad: bool):
    node.ports[ONE]["rate"] = f"{rate} Gb/sec (4X)"
    assert node.complaints() == ([("ib.rate", f"{ONE}:1", FAIL)] if bad else [])


def test_ports_slower_than_configured_fail_though_all_are_alike(node: FabricNode):
    node.all_compute(rate="200 Gb/sec (4X HDR)")
    assert len(node.complaints(hca_rate_gbps=400.0)) == 8
    assert not node.complaints(hca_rate_gbps=200.0)


def test_of_two_rates_that_as_many_ports_have_the_higher_is_right(node: FabricNode):
    for name in COMPUTE[:4]:
        node.ports[name]["rate"] = "200 Gb/sec (4X HDR)"
    assert [device for _, device, _ in node.complaints()] == [f"{name}:1" for name in COMPUTE[:4]]


def test_a_lost_adapter_is_missed_beside_its_gpu(node: FabricNode):
    del node.ports[ONE], node.counters[ONE]
    assert node.complaints() == [("ib.count", "GPU at 0000:33:00.0", FAIL)]


def test_where_many_gpus_have_no_adapter_that_is_how_the_node_is_built(node: FabricNode):
    for name in COMPUTE[:4]:
        del node.ports[name], node.counters[name]
    del node.ports["mlx5_4"], node.counters["mlx5_4"]
    assert not node.complaints()


def test_an_adapter_without_driver_fails(node: FabricNode):
    path = node.ports[ONE]["path"]
    del node.ports[ONE], node.counters[ONE]
    node.others = [("driverless", {"path": path})]
    assert node.complaints() == [("ib.count", str(path)[-12:], FAIL)]


def test_many_adapters_without_driver_are_told_one_by_one(node: FabricNode):
    for name in COMPUTE[:3]:
        node.others.append(("driverless", {"path": node.ports[name]["path"]}))
        del node.ports[name], node.counters[name]
    assert [check for check, _, _ in node.complaints()] == ["ib.count"] * 3


def test_an_adapter_without_ports_fails(node: FabricNode):
    node.others = [("portless", {"dev": "mlx5_30"})]
    assert node.complaints() == [("ib.count", "mlx5_30", FAIL)]


@pytest.mark.parametrize(("width", "complaint"), [(16, None), (8, FAIL), (15, UNKNOWN), ("", UNKNOWN)])
def test_all_pcie_lanes_must_be_there(node: FabricNode, width: object, complaint: Verdict | None):
    node.ports[ONE]["width"] = width
    assert node.complaints() == ([("ib.pcie", ONE, complaint)] if complaint else [])


def test_missing_lanes_fail_though_they_would_do(node: FabricNode):
    node.all_compute(rate="200 Gb/sec (4X HDR)")
    node.ports[ONE]["width"] = 12
    assert node.complaints() == [("ib.pcie", ONE, FAIL)]


def test_more_lanes_than_there_can_be_make_no_sense(node: FabricNode):
    node.ports[ONE]["width_max"] = 4
    assert node.complaints() == [("ib.pcie", ONE, UNKNOWN)]


@pytest.mark.parametrize(("speed", "bad"), [("32.0 GT/s PCIe", False), ("16.0 GT/s PCIe", True)])
def test_pcie_must_carry_what_the_port_does(node: FabricNode, speed: str, bad: bool):
    node.ports[ONE]["speed"] = speed
    assert node.complaints() == ([("ib.pcie", ONE, FAIL)] if bad else [])


@pytest.mark.parametrize("speed", ["", "Unknown"])
def test_unreadable_pcie_speed_is_no_good_news(node: FabricNode, speed: str):
    node.ports[ONE]["speed"] = speed
    assert node.complaints() == [("ib.pcie", ONE, UNKNOWN)]


def test_a_fast_adapter_in_a_slower_slot_is_fine_while_the_slot_carries_its_port(node: FabricNode):
    node.all_compute(rate="200 Gb/sec (4X HDR)", speed="16.0 GT/s PCIe")
    assert not node.complaints()


def test_a_virtual_machine_that_tells_no_pcie_width_is_skipped(node: FabricNode):
    node.all_compute(width="", width_max="")
    assert of(node.check(), "ib.pcie").severity is Verdict.SKIP


@pytest.mark.parametrize(("layer", "severity"), [("InfiniBand", WARN), ("Ethernet", FAIL)])
def test_another_mtu_than_most_is_named(node: FabricNode, layer: str, severity: Verdict):
    if layer == "Ethernet":
        roce(node)
    node.ports[ONE]["netdev_mtu"] = 2044
    assert node.complaints() == [("ib.mtu", f"{ONE}:1", severity)]


def test_a_healthy_roce_node_is_ok(node: FabricNode):
    assert not roce(node).complaints()
    assert of(node.check(), "ib.gid").observed == "index 3"


def test_a_roce_port_without_ipv4_gid_fails(node: FabricNode):
    roce(node).ports[ONE]["gid.3"] = ""
    assert node.complaints() == [("ib.gid", f"{ONE}:1", FAIL)]


def test_roce_gids_at_different_indices_are_a_warning(node: FabricNode):
    roce(node).ports[ONE] |= {"gid.3": "", **roce_gids("0a00:0009", first=4)}
    assert node.complaints() == [("ib.gid", None, WARN)]


@pytest.mark.parametrize(("mtu", "bad"), [(9000, False), (4200, False), (4199, True), (1500, True)])
def test_roce_wants_an_mtu_for_its_packets(node: FabricNode, mtu: int, bad: bool):
    roce(node).all_compute(netdev_mtu=mtu)
    assert node.complaints() == ([("ib.mtu", None, WARN)] if bad else [])


def bare() -> FabricNode:
    return FabricNode({}, [f"{switch(0)}/0000:03:00.0"], {}, {}, ["[    0.000000] Linux version"])


def test_a_node_without_adapters_is_skipped_unless_they_are_expected():
    (finding,) = bare().check()
    assert (finding.check, finding.severity) == ("ib.count", Verdict.SKIP)
    assert ("ib.count", None, FAIL) in bare().complaints(hcas=8)


def test_the_only_adapter_may_be_that_of_management():
    node = bare()
    node.ports["mlx5_0"] = port("mlx5_0", 0xE0, link_layer="Ethernet", netdev="eth0", default_route=1)
    (finding,) = node.check()
    assert (finding.severity, finding.observed) == (
        Verdict.SKIP,
        "no adapter for training: mlx5_0:1 eth0 carries the default route",
    )


def test_traits_are_what_all_nodes_must_have_alike(node: FabricNode):
    told = {"ib.link_layer": "InfiniBand", "ib.mtu": "4092", "ib.rate": "400"}
    assert GROUP.traits(node.probe(), ClusterConfig()) == {**told, "ib.count": "8"}
    assert GROUP.traits(node.probe(), ClusterConfig(expected=ExpectedHardware(hcas=8))) == told


def test_a_trait_that_one_port_does_not_tell_is_left_out(node: FabricNode):
    node.ports[ONE]["netdev_mtu"] = ""
    assert "ib.mtu" not in GROUP.traits(node.probe(), ClusterConfig())
    assert GROUP.traits(damaged(node.probe(), "ib.ports", exit_code=1), ClusterConfig()) == {}


def fleet(*nodes: FabricNode, **expected: object) -> set[tuple[str, str, Verdict]]:
    """What comparing nodes says of who is odd."""
    config = ClusterConfig(expected=ExpectedHardware(**expected))
    traits = {f"n{at}": GROUP.traits(one.probe(f"n{at}"), config) for at, one in enumerate(nodes, start=1)}
    found = profile_findings(traits, config.expected)
    return {(one.node, one.check, one.severity) for one in found if one.severity in (WARN, FAIL)}


def test_the_node_with_another_number_or_rate_of_ports_is_named():
    less, slow = FabricNode.healthy(), FabricNode.healthy()
    less.ports[ONE]["state"] = "1: DOWN"
    slow.all_compute(rate="200 Gb/sec (4X HDR)")
    healthy = [FabricNode.healthy() for _ in range(3)]
    assert fleet(*healthy) == set()
    assert fleet(*healthy, less) == {("n4", "ib.count", FAIL)}
    assert fleet(*healthy, less, hcas=7) == set()
    assert fleet(*healthy, slow, hca_rate_gbps=200.0) == set()
    assert fleet(*healthy, slow) == {("n4", "ib.rate", FAIL)}
    assert fleet(*healthy, bare()) == {("n4", "ib.count", FAIL)}


def test_unreadable_ports_make_every_check_unknown(node: FabricNode):
    node.sections = {"ib.ports": damaged(node.probe(), "ib.ports", state=SectionState.TIMED_OUT).section("ib.ports")}
    assert complaints(node.check()) == [
        (check, None, UNKNOWN) for check in dict.fromkeys(f.check for f in node.check())
    ]
    assert {finding.check for finding in node.check()} == CHECKS


# What tools of this kind are known to let pass.


def fine(node: FabricNode) -> set[str]:
    """Names of the checks in which everything is OK."""
    findings = node.check()
    return {one.check for one in findings} - {one.check for one in findings if one.severity is not Verdict.OK}


def test_one_good_port_does_not_make_a_good_node(node: FabricNode):
    for name in set(COMPUTE) - {ONE}:
        node.ports[name] |= {"state": "1: DOWN", "phys_state": "2: Polling"}
    assert len(node.complaints()) == 7
    assert "ib.count" not in fine(node)


def test_good_ports_of_another_network_do_not_make_up_for_a_bad_one(node: FabricNode):
    node.ports["mlx5_4"] |= {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    node.ports[ONE] |= {"state": "1: DOWN", "phys_state": "3: Disabled"}
    assert ("ib.count", None, FAIL) in node.complaints(hcas=8)


def test_no_port_up_is_not_all_ports_fine(node: FabricNode):
    node.all_compute(state="1: DOWN", phys_state="3: Disabled")
    assert fine(node) <= {"ib.pcie", "ib.counters", "ib.flaps", "ib.health", "ib.gpudirect"}


def test_a_rate_of_a_port_that_is_down_does_not_count(node: FabricNode):
    node.ports[ONE] |= {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "800 Gb/sec (4X XDR)"}
    assert node.complaints() == [("ib.state", f"{ONE}:1", FAIL)]


def test_adapters_that_no_driver_offers_are_not_a_node_without_adapters():
    node = bare()
    node.gpus, node.others = [], [("driverless", {"path": "/sys/devices"})]
    assert ("ib.count", "an unknown address", FAIL) in node.complaints()


@pytest.mark.parametrize("text", ["", "?", "-", "N/A", "4"])
@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("state", "state"), ("phys_state", "state"), ("rate", "rate")),
        *(("width", "pcie"), ("width_max", "pcie"), ("netdev_mtu", "mtu")),
    ],
)
def test_no_field_of_a_port_can_turn_to_nonsense_unseen(node: FabricNode, key: str, name: str, text: str):
    node.ports[ONE][key] = text
    assert f"ib.{name}" not in fine(node)
