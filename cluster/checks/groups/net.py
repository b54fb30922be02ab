"""Group `net`: the interface that nodes talk over (rendezvous, sockets, our own traffic), node by node and together."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup, TestBetween, known
from cluster.checks.groups.pairs import CHECK as PAIRS
from cluster.checks.groups.pairs import check_pairs
from cluster.ssh.connection import Connection
from cluster.survey.facts import NodeFacts
from cluster.survey.interfaces import LINKS, NetInterface
from engine.config.cluster import ClusterConfig


def check_interface(check: Check, facts: NodeFacts) -> list[Finding]:
    """There is one interface that other nodes can reach: up, with IPv4, not of containers."""
    choice, check = facts.interface, check.expecting("an interface that others reach")
    if choice.interface is None:
        return [check.fail(choice.reason, "name the one that nodes share: cluster.interface=NAME")]
    return [check.ok(f"{choice.interface.name}, {', '.join(choice.interface.addresses)}", choice.reason)]


def _interface(facts: NodeFacts) -> NetInterface | None:
    return facts.interface.interface


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    interface = _interface(facts)
    return {"net.mtu": str(interface.mtu) if interface is not None and interface.mtu is not None else None}


def _between(config: ClusterConfig) -> Mapping[str, TestBetween]:
    """Connects of all pairs."""

    def test(connections: Mapping[str, Connection], nodes: Mapping[str, NodeFacts]) -> list[Finding]:
        chosen = {node: known(_interface, facts) for node, facts in nodes.items()}
        return check_pairs(connections, {node: one.addresses[0] if one else "" for node, one in chosen.items()})

    return {PAIRS: test}


GROUP = CheckGroup(
    "net",
    (check_interface,),
    questions=(LINKS,),
    traits=_traits,
    between=_between,
    compared={
        "net.mtu": "These interfaces have one MTU; different ones lose large packets without a word.",
        PAIRS: "Every node can open a TCP connection to every other, in both directions.",
    },
)
