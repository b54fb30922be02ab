"""The group `net`: one node's interface, and what the interfaces of all nodes have in common."""

from __future__ import annotations

import pytest
from fabric_nodes import LO, default_route, link, net_probe
from testkit.check_fakes import Groups, changed_section

from cluster.checks.finding import Finding, Verdict
from cluster.checks.groups.net import compare_subnets
from cluster.survey.interfaces import NetInterface
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig

GROUP = Groups("net")

DOCKER = link("docker0", "172.17.0.1/16", kind="bridge")


def probe(*links: object, route: str | None = "eth0", name: str = "n1", sysfs: str = "{}") -> NodeProbe:
    return net_probe([LO, *links], [default_route(route)] if route else [], name=name, sysfs=sysfs)


def severities(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.severity for finding in findings}


def check(one: NodeProbe, interface: str | None = None) -> list[Finding]:
    return GROUP.check(one, ClusterConfig(interface=interface))


def test_a_node_with_a_default_route_is_ok_and_says_why():
    finding = check(probe(link("eth0", "10.0.0.1/24"), DOCKER))[0]
    assert (finding.severity, finding.observed, finding.evidence) == (
        Verdict.OK,
        "eth0, 10.0.0.1/24",
        "the default route leaves here",
    )


@pytest.mark.parametrize("name", ["lo", "docker0", "eth1", "eth9"])
def test_a_named_interface_that_others_cannot_reach_fails(name: str):
    one = probe(link("eth0", "10.0.0.1/24"), DOCKER, link("eth1", "10.1.0.1/24", state="DOWN"))
    assert severities(check(one, name)) == {"net.interface": Verdict.FAIL, "net.mtu": Verdict.SKIP}


def test_no_interface_fails():
    assert severities(check(probe(DOCKER, route="docker0"))) == {"net.interface": Verdict.FAIL, "net.mtu": Verdict.SKIP}


@pytest.mark.parametrize("section", ["net.links", "net.route"])
def test_unreadable_interfaces_are_unknown(section: str):
    one = changed_section(probe(link("eth0", "10.0.0.1/24")), section, state=SectionState.TIMED_OUT)
    assert severities(check(one)) == {"net.interface": Verdict.UNKNOWN, "net.mtu": Verdict.UNKNOWN}


@pytest.mark.parametrize(("mtu", "severity"), [(1280, Verdict.OK), (1279, Verdict.WARN), (None, Verdict.UNKNOWN)])
def test_a_tiny_mtu_is_a_warning(mtu: int | None, severity: Verdict):
    assert severities(check(probe(link("eth0", "10.0.0.1/24", mtu=mtu))))["net.mtu"] is severity


def interface(*addresses: str, name: str = "eth0") -> NetInterface:
    return NetInterface(name, True, 1500, addresses=addresses)


def subnets(*interfaces: NetInterface | None) -> list[Verdict]:
    named = {f"n{number}": one for number, one in enumerate(interfaces, start=1)}
    return [finding.severity for finding in compare_subnets(named)]


def test_one_subnet_is_ok():
    assert subnets(interface("10.0.0.1/24"), interface("10.0.0.2/24", name="ens1")) == [Verdict.OK, Verdict.OK]


def test_the_node_in_another_subnet_is_named():
    found = subnets(interface("10.0.0.1/24"), interface("10.0.0.2/24"), interface("10.9.0.3/24"))
    assert found == [Verdict.OK, Verdict.OK, Verdict.WARN]


def test_another_prefix_length_is_another_subnet():
    found = subnets(interface("10.0.0.1/24"), interface("10.0.0.2/24"), interface("10.0.0.3/16"))
    assert found == [Verdict.OK, Verdict.OK, Verdict.WARN]


def test_a_second_address_in_the_subnet_is_enough():
    assert subnets(interface("10.0.0.1/24"), interface("10.9.0.2/24", "10.0.0.2/24")) == [Verdict.OK, Verdict.OK]


def test_two_nodes_with_one_address_fail():
    found = compare_subnets(
        {"n1": interface("172.17.0.1/16"), "n2": interface("172.17.0.1/16"), "n3": interface("172.17.0.3/16")}
    )
    assert [finding.severity for finding in found] == [Verdict.FAIL, Verdict.FAIL, Verdict.OK]
    assert "so has n2" in found[0].observed


def test_networks_of_one_address_each_are_skipped():
    assert subnets(interface("10.0.0.1/32"), interface("10.0.0.2/32")) == [Verdict.SKIP, Verdict.SKIP]


def test_a_node_without_interface_is_unknown():
    assert subnets(interface("10.0.0.1/24"), None) == [Verdict.OK, Verdict.UNKNOWN]
    assert subnets(None, None) == [Verdict.UNKNOWN, Verdict.UNKNOWN]


def test_a_single_node_is_not_compared():
    assert subnets(interface("10.0.0.1/24")) == []


def test_the_named_interface_is_the_one_that_is_compared():
    probes = {f"n{at}": probe(link("eth0", f"10.0.0.{at}/24", mtu=9000), name=f"n{at}") for at in (1, 2)}
    assert GROUP.traits(probes["n1"], ClusterConfig()) == {"net.mtu": "9000"}
    assert GROUP.traits(probes["n1"], ClusterConfig(interface="eth1")) == {}
    for interface, severity in ((None, Verdict.OK), ("eth1", Verdict.UNKNOWN)):
        found = GROUP.compare(probes, ClusterConfig(interface=interface))
        assert [(one.check, one.severity) for one in found] == [("net.subnet", severity)] * 2
