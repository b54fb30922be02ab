"""Group `net`: the interface that nodes talk over (rendezvous, sockets, our own traffic), node by node and together."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Mapping

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup, TestBetween, known
from cluster.checks.groups.pairs import CHECK as PAIRS
from cluster.checks.groups.pairs import check_pairs
from cluster.ssh.connection import Connection
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import LINKS, ROUTE, SYSFS, InterfaceChoice, NetInterface
from engine.config.cluster import ClusterConfig

_MIN_MTU = 1280


def check_interface(check: Check, choice: InterfaceChoice) -> list[Finding]:
    """There is one interface that other nodes can reach: up, with IPv4, not of containers."""
    check = check.expecting("an interface that others reach")
    if choice.interface is None:
        return [check.fail(choice.reason, "name the one that nodes share: cluster.interface=NAME")]
    return [check.ok(f"{choice.interface.name}, {', '.join(choice.interface.addresses)}", choice.reason)]


def check_mtu(check: Check, choice: InterfaceChoice) -> list[Finding]:
    """These interfaces have one MTU; different ones lose large packets without a word."""
    check, interface = check.expecting(f"at least {_MIN_MTU}"), choice.interface
    if interface is None:
        return [check.skip("no interface was chosen")]
    if interface.mtu is None:
        return [check.unknown(f"{interface.name}: not readable", f"look at ip link show {interface.name}")]
    if interface.mtu < _MIN_MTU:
        return [check.warn(str(interface.mtu), f"ip link set {interface.name} mtu 1500")]
    return [check.ok(str(interface.mtu))]


def compare_subnets(interfaces_by_node: Mapping[str, NetInterface | None]) -> list[Finding]:
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
    return [
        _subnet(Check(node, "net.subnet", usual), interface, owners) for node, interface in interfaces_by_node.items()
    ]


def _subnet(check: Check, interface: NetInterface | None, owners: Mapping[str, list[str]]) -> Finding:
    if interface is None:
        return check.unknown("no interface was chosen", "see net.interface")
    check, shown = check.on(interface.name), ", ".join(interface.addresses)
    for address in interface.addresses:
        others = [node for node in owners[address.partition("/")[0]] if node != check.node]
        if others:
            text = f"{shown}, and so has {', '.join(others[:4])}"
            return check.fail(text, "name an interface that leads to the other nodes: cluster.interface=NAME")
    networks = {_network(address) for address in interface.addresses}
    if all(network.endswith("/32") for network in networks):
        return check.skip(f"{shown}: every node has a network of its own, as some clouds do it")
    if check.expected in networks:
        return check.ok(shown)
    return check.warn(shown, "if a router joins the two, all is well; else name the right one: cluster.interface=NAME")


def _network(address: str) -> str:
    return str(ipaddress.ip_interface(address).network)


def _chosen(nodes: Mapping[str, NodeFacts]) -> dict[str, NetInterface | None]:
    choices = {node: known(lambda facts: facts.interface, facts) for node, facts in nodes.items()}
    return {node: choice.interface if choice is not None else None for node, choice in choices.items()}


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    interface = facts.interface.interface
    return {"net.mtu": str(interface.mtu) if interface is not None and interface.mtu is not None else None}


def _between(config: ClusterConfig) -> Mapping[str, TestBetween]:
    """Connects of all pairs."""

    def test(connections: Mapping[str, Connection], nodes: Mapping[str, NodeFacts]) -> list[Finding]:
        found = _chosen(nodes)
        addresses = {node: one.addresses[0] if one is not None else "" for node, one in found.items()}
        return check_pairs(connections, addresses)

    return {PAIRS: test}


GROUP = CheckGroup(
    "net",
    (check_interface, check_mtu),
    look=lambda facts: facts.interface,
    questions=(LINKS, ROUTE, SYSFS),
    traits=_traits,
    compare=lambda nodes: compare_subnets(_chosen(nodes)),
    between=_between,
    compared={
        "net.subnet": "The interfaces that nodes talk over lie in one subnet, and no two nodes have one address.",
        PAIRS: "Every node can open a TCP connection to every other, in both directions.",
    },
)
