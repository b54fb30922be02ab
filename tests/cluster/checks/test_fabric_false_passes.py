"""What tools of this kind are known to let pass, each with a node on which ours must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabric_nodes import COMPUTE, LO, FabricNode, complaints, default_route, ended, link, net_probe
from hypothesis import given
from hypothesis import strategies as st

from cluster.checks import ib, net
from cluster.checks.finding import Finding, Verdict
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig, ExpectedHardware


def healthy_probe() -> NodeProbe:
    network = net_probe([LO, link("eth0", "10.0.0.1/24")], [default_route("eth0")])
    return NodeProbe("n1", {**FabricNode.healthy().probe().sections, **network.sections})


def check(probe: NodeProbe, **expected: object) -> list[Finding]:
    config = ClusterConfig(expected=ExpectedHardware(**expected))
    return ib.GROUP.check(probe, config) + net.GROUP.check(probe, config)


def fine(findings: list[Finding]) -> set[str]:
    """Names of the checks in which everything is OK."""
    names = {finding.check for finding in findings}
    return names - {finding.check for finding in findings if finding.severity is not Verdict.OK}


def test_the_healthy_node_is_healthy():
    assert complaints(check(healthy_probe())) == []


@pytest.mark.parametrize("good", COMPUTE)
def test_one_good_port_does_not_make_a_good_node(good: str):
    node = FabricNode.healthy()
    for name in set(COMPUTE) - {good}:
        node.ports[name] |= {"state": "1: DOWN", "phys_state": "2: Polling"}
    assert len(complaints(node.check())) == 7
    assert "ib.count" not in fine(node.check())


def test_ports_are_counted():
    node = FabricNode.healthy()
    for name in COMPUTE[:3]:
        del node.ports[name], node.counters[name]
    del node.ports["mlx5_4"], node.counters["mlx5_4"]
    assert ("ib.count", None, Verdict.FAIL) in node.complaints(hcas=8)


def test_good_ports_of_another_network_do_not_make_up_for_a_bad_one():
    node = FabricNode.healthy()
    node.ports["mlx5_4"] |= {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    node.ports[COMPUTE[3]] |= {"state": "1: DOWN", "phys_state": "3: Disabled"}
    assert ("ib.count", None, Verdict.FAIL) in node.complaints(hcas=8)


def test_no_port_up_is_not_all_ports_fine():
    node = FabricNode.healthy()
    node.all_compute(state="1: DOWN", phys_state="3: Disabled")
    assert fine(node.check()) <= {"ib.pcie", "ib.counters", "ib.flaps", "ib.health", "ib.gpudirect"}


def test_a_rate_of_a_port_that_is_down_does_not_count():
    node = FabricNode.healthy()
    node.ports[COMPUTE[0]] |= {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "800 Gb/sec (4X XDR)"}
    assert node.complaints() == [("ib.state", f"{COMPUTE[0]}:1", Verdict.FAIL)]


def test_a_saturated_counter_that_does_not_grow_is_not_a_good_one():
    node = FabricNode.healthy()
    node.counters[COMPUTE[0]]["link_downed"] = 255
    assert "ib.counters" not in fine(node.check())


def test_a_kernel_log_that_may_not_be_read_is_not_a_quiet_one():
    denied = ended("ib.kernel", "uptime\t900\ndmesg: read kernel buffer failed: Operation not permitted", 1)
    node = FabricNode.healthy()
    node.sections = {"ib.kernel": denied}
    assert node.complaints() == [("ib.flaps", None, Verdict.UNKNOWN), ("ib.health", None, Verdict.UNKNOWN)]
    node.sections = {"ib.kernel": replace(denied, exit_code=0)}
    assert len(node.complaints()) == 2


def test_adapters_that_no_driver_offers_are_not_a_node_without_adapters():
    node = FabricNode(
        {}, [], {}, {}, ["[    0.000000] Linux version"], others=[("driverless", {"path": "/sys/devices"})]
    )
    assert ("ib.count", "an unknown address", Verdict.FAIL) in node.complaints()


def test_an_unreadable_file_of_one_port_is_seen():
    for key, name in (
        ("rate", "ib.rate"),
        ("width", "ib.pcie"),
    ):
        node = FabricNode.healthy()
        node.ports[COMPUTE[4]][key] = ""
        assert name not in fine(node.check()), key


KEYS = {
    "state": "ib.state",
    "phys_state": "ib.state",
    "rate": "ib.rate",
    "width": "ib.pcie",
    "width_max": "ib.pcie",
    "netdev_mtu": "ib.mtu",
}


@given(
    device=st.sampled_from(COMPUTE), key=st.sampled_from(sorted(KEYS)), text=st.sampled_from(["", "?", "-", "N/A", "4"])
)
def test_no_field_of_any_port_can_turn_to_nonsense_unseen(device: str, key: str, text: str):
    node = FabricNode.healthy()
    node.ports[device][key] = text
    assert KEYS[key] not in fine(node.check())
