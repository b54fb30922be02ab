"""Group `net`: the interface that nodes talk over (rendezvous, sockets, our own traffic), node by node and together."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Mapping

from cluster.checks.finding import Finding, Verdict
from cluster.checks.profile import profile_findings
from cluster.checks.report import Report
from cluster.parse.fabric import NetInterface
from cluster.parse.interfaces import choose_interface, explain_interface, parse_interfaces, read_interfaces
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

_MIN_MTU = 1280


class NetworkGroup:
    """See `cluster.checks.finding.CheckGroup`."""

    name = "net"

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Whether there is one interface that others can reach, and what it can do."""
        report = Report(probe.node, "net.interface", expected=config.interface or "an interface that others reach")
        try:
            choice = explain_interface(read_interfaces(probe), config.interface)
        except UnreadableError as error:
            return [report.unknown(str(error), "run the check again; see the evidence", error.evidence)]
        interface = choice.interface
        if interface is None:
            return [report.fail(choice.reason, "name the one that nodes share: cluster.interface=NAME")]
        shown = f"{interface.name}, {', '.join(interface.addresses)}"
        return [report.ok(shown, choice.reason), _mtu(probe.node, interface)]

    def traits(self, probe: NodeProbe) -> Mapping[str, str]:
        """None: which interface counts is known with the configuration only, see `check_fleet`."""
        return {}


GROUP = NetworkGroup()


def check_fleet(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
    """Whether the interfaces that the nodes talk over lie in one subnet, and which has another MTU."""
    chosen = {node: choose_interface(parse_interfaces(probe), config.interface) for node, probe in probes.items()}
    traits = {}
    for node, interface in chosen.items():
        if interface is not None:
            traits[node] = {} if interface.mtu is None else {"net.mtu": str(interface.mtu)}
    compared = profile_findings(traits, config.expected)
    odd = [finding for finding in compared if finding.severity in (Verdict.WARN, Verdict.FAIL)]
    return check_subnets(chosen) + odd


def check_subnets(interfaces_by_node: Mapping[str, NetInterface | None]) -> list[Finding]:
    """Whether the chosen interfaces lie in one subnet, and no two nodes have one address; [] for less than two nodes.

    Another subnet is a warning: routers may join them, which the connections between all pairs show. An address that
    two nodes have is a failure: they meant a network that exists on each of them alone.
    """
    if len(interfaces_by_node) < 2:
        return []
    owners: dict[str, list[str]] = defaultdict(list)
    votes: Counter[str] = Counter()
    for node, interface in interfaces_by_node.items():
        addresses = interface.addresses if interface is not None else ()
        votes.update({_network(address) for address in addresses})
        for address in {address.partition("/")[0] for address in addresses}:
            owners[address].append(node)
    usual = max(votes, key=lambda network: votes[network], default="")
    findings = []
    for node, interface in interfaces_by_node.items():
        report = Report(node, "net.subnet", expected=usual, device=interface.name if interface else None)
        findings.append(_subnet(report, interface, usual, owners))
    return findings


def _subnet(report: Report, interface: NetInterface | None, usual: str, owners: Mapping[str, list[str]]) -> Finding:
    if interface is None:
        return report.unknown("no interface was chosen", "see net.interface")
    shown = ", ".join(interface.addresses)
    for address in interface.addresses:
        others = [node for node in owners[address.partition("/")[0]] if node != report.node]
        if others:
            text = f"{shown}, and so has {', '.join(others[:4])}"
            return report.fail(text, "name an interface that leads to the other nodes: cluster.interface=NAME")
    networks = {_network(address) for address in interface.addresses}
    if all(network.endswith("/32") for network in networks):
        return report.skip(f"{shown}: every node has a network of its own, as some clouds do it")
    if usual in networks:
        return report.ok(shown)
    return report.warn(shown, "if a router joins the two, all is well; else name the right one: cluster.interface=NAME")


def _network(address: str) -> str:
    return str(ipaddress.ip_interface(address).network)


def _mtu(node: str, interface: NetInterface) -> Finding:
    report = Report(node, "net.mtu", expected=f"at least {_MIN_MTU}")
    if interface.mtu is None:
        return report.unknown(f"{interface.name}: not readable", f"look at ip link show {interface.name}")
    if interface.mtu < _MIN_MTU:
        return report.warn(str(interface.mtu), f"ip link set {interface.name} mtu 1500")
    return report.ok(str(interface.mtu))
