"""The group `net`: one node's interface, and what the interfaces of all nodes have in common."""

from __future__ import annotations

import pytest
from fabric_nodes import LO, default_route, link, net_probe
from testkit.check_fakes import Groups, changed_section

from cluster.checks.finding import Verdict
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig

GROUP = Groups("net")
OK, SKIP, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL

DOCKER = link("docker0", "172.17.0.1/16", kind="bridge")
ETH0, DOWN = link("eth0", "10.0.0.1/24"), link("eth1", "10.1.0.1/24", state="DOWN")


def probe(*links: object, route: str = "eth0", name: str = "n1") -> NodeProbe:
    return net_probe([LO, *links], [default_route(route)], name=name)


def silent(section: str) -> NodeProbe:
    return changed_section(probe(ETH0), section, state=SectionState.TIMED_OUT)


@pytest.mark.parametrize(
    ("one", "named", "interface", "mtu"),
    [
        (probe(ETH0, DOCKER), None, (OK, "eth0, 10.0.0.1/24"), (OK, "1500")),
        # An interface that others cannot reach, named or not.
        *((probe(ETH0, DOCKER, DOWN), name, (FAIL, name), (SKIP, "no")) for name in ("lo", "docker0", "eth1")),
        (probe(ETH0), "eth9", (FAIL, "there is no interface eth9"), (SKIP, "no interface was chosen")),
        (probe(DOCKER, route="docker0"), None, (FAIL, "none of lo, docker0 has"), (SKIP, "no interface was chosen")),
        *((silent(name), None, (UNKNOWN, f"{name}: timed"), (UNKNOWN, name)) for name in ("net.links", "net.route")),
        (probe(link("eth0", "10.0.0.1/24", mtu=1280)), None, (OK, "eth0"), (OK, "1280")),
        (probe(link("eth0", "10.0.0.1/24", mtu=1279)), None, (OK, "eth0"), (WARN, "1279")),
        (probe(link("eth0", "10.0.0.1/24", mtu=None)), None, (OK, "eth0"), (UNKNOWN, "eth0: not readable")),
    ],
)
def test_the_interface_of_a_node(
    one: NodeProbe, named: str | None, interface: tuple[Verdict, str], mtu: tuple[Verdict, str]
) -> None:
    found = GROUP.check(one, ClusterConfig(interface=named))
    assert [finding.check for finding in found] == ["net.interface", "net.mtu"]
    for finding, (severity, text) in zip(found, (interface, mtu), strict=True):
        assert finding.severity is severity
        assert finding.observed.startswith(text)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1/24", "10.0.0.2/24"], [(OK, "10.0.0.1/24"), (OK, "10.0.0.2/24")]),
        (["10.0.0.1/24", "10.0.0.2/24", "10.9.0.3/24"], [(OK, ""), (OK, ""), (WARN, "10.9.0.3/24")]),
        (["10.0.0.1/24", "10.0.0.2/24", "10.0.0.3/16"], [(OK, ""), (OK, ""), (WARN, "10.0.0.3/16")]),
        (["10.0.0.1/24", "10.9.0.2/24 10.0.0.2/24"], [(OK, ""), (OK, "10.9.0.2/24, 10.0.0.2/24")]),
        (
            ["172.16.0.1/16", "172.16.0.1/16", "172.16.0.3/16"],
            [(FAIL, "172.16.0.1/16, and so has n2"), (FAIL, "172.16.0.1/16, and so has n1"), (OK, "")],
        ),
        (["10.0.0.1/32", "10.0.0.2/32"], [(SKIP, "10.0.0.1/32: every node has a network of its own"), (SKIP, "")]),
        (["10.0.0.1/24", ""], [(OK, ""), (UNKNOWN, "no interface was chosen")]),
        (["", ""], [(UNKNOWN, "no interface was chosen")] * 2),
        (["10.0.0.1/24"], []),  # a single node is not compared
    ],
)
def test_interfaces_lie_in_one_subnet(addresses: list[str], expected: list[tuple[Verdict, str]]) -> None:
    probes = {
        f"n{at}": probe(*([link("eth0", *told.split())] if told else []), name=f"n{at}")
        for at, told in enumerate(addresses, start=1)
    }
    found = GROUP.compare(probes, ClusterConfig())
    assert [(one.check, one.node) for one in found] == [("net.subnet", name) for name in probes][: len(expected)]
    for finding, (severity, text) in zip(found, expected, strict=True):
        assert finding.severity is severity
        assert finding.observed.startswith(text)


def test_the_mtu_of_the_chosen_interface_is_what_nodes_share() -> None:
    one = probe(link("eth0", "10.0.0.1/24", mtu=9000))
    assert GROUP.traits(one, ClusterConfig()) == {"net.mtu": "9000"}
    assert GROUP.traits(one, ClusterConfig(interface="eth1")) == {}
