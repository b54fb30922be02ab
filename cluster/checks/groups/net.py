"""Group `net`: the interface that nodes talk over (rendezvous, sockets, our own traffic), node by node, and all nodes
against all: does a TCP connection work from each to each other, in both directions?

For these connections a program runs on every node (`cluster.agent.pairs`), started over SSH, gone when we are.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.agent.messages import Message
from cluster.checks.check import Check, CheckGroup, Finding, TestBetween, known
from cluster.code import NodeProgram
from cluster.errors import ClusterError, SshError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import fan_out
from cluster.survey.facts import NodeFacts
from cluster.survey.network import LINKS, NetInterface, Network
from engine.config.cluster import ClusterConfig

PAIRS, MACHINE = "net.pairs", "net.machine"
START_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 3.0
# Connections that one node opens at the same time, and nodes that do so.
WIDTH = 64
OK = "ok"
_AGENT = ("cluster.agent.pairs", "burst-pairs")
_SLACK_S = 15.0
_NAMED = 8
_REMEDY = "look for a firewall between them, a cable or switch port, and the right cluster.interface"

# (source, target) -> how that connection ended: ok, refused, timeout, unreachable, reset, ...; not there: not tried.
Ways = Mapping[tuple[str, str], str]


def check_pairs(
    connections: Mapping[str, Connection], addresses: Mapping[str, str], *, start_timeout_s: float = START_TIMEOUT_S
) -> list[Finding]:
    """net.pairs of every node. N nodes make N * (N - 1) connections, at most WIDTH at a time from one node.

    addresses: by node, IPv4 or IPv6, with or without prefix length; empty where none was chosen. A node without agent
    is UNKNOWN and is not part of any pair.
    """
    token, patience_s = secrets.token_hex(32), CONNECT_TIMEOUT_S * math.ceil(len(connections) / WIDTH) + _SLACK_S
    agents: dict[str, NodeProgram] = {}
    places: dict[str, tuple[str, int]] = {}

    def start(node: str) -> None:
        address = addresses.get(node, "").partition("/")[0]
        if not address:
            raise ClusterError("no address to test was chosen: see net.interface")
        agents[node] = NodeProgram(connections[node], words=_AGENT)
        told = agents[node].ask({"listen": {"address": address, "token": token}}, silence_s=start_timeout_s)[0]
        port = told.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ClusterError(f"cannot listen on {address}: {one_line(str(told.get('error')))}")
        places[node] = address, port

    def connect(node: str) -> Ways:
        # Each node begins with the one after it: else all would begin with the first.
        others = [*ready[ready.index(node) + 1 :], *ready[: ready.index(node)]]
        targets = [(other, *places[other]) for other in others]
        question: Message = {"greet": {"targets": targets, "timeout_s": CONNECT_TIMEOUT_S, "width": WIDTH}}
        return read_ways(node, others, agents[node].ask(question, silence_s=patience_s)[0]) if others else {}

    hosts = [replace(connection.host, name=node) for node, connection in connections.items()]
    try:
        started = fan_out(hosts, lambda host: start(host.name))
        absent = {node: _why(outcome.error) for node, outcome in started.items() if outcome.error is not None}
        ready = [node for node in connections if node not in absent]
        asked = fan_out([host for host in hosts if host.name in ready], lambda host: connect(host.name), width=WIDTH)
    finally:
        for agent in list(agents.values()):
            agent.close()
    ways = {way: end for outcome in asked.values() for way, end in (outcome.value or {}).items()}
    return judge_pairs(list(connections), ways, absent)


def _why(error: Exception) -> str:
    return one_line(error.detail if isinstance(error, SshError) else str(error))


def read_ways(source: str, targets: Sequence[str], answer: Mapping[str, object]) -> Ways:
    """What the answer of an agent says, whatever it holds."""
    results = answer.get("results")
    rows = [row for row in results if isinstance(row, list) and len(row) == 4] if isinstance(results, list) else []
    return {(source, row[0]): one_line(str(row[1]), 40) for row in rows if row[0] in targets}


def judge_pairs(nodes: Sequence[str], ways: Ways, absent: Mapping[str, str]) -> list[Finding]:
    """One finding per node. A broken pair is told at both its ends, unless one end is cut off from most others while
    most are not: then it is that node's fault alone."""
    tested = [node for node in nodes if node not in absent]
    bad = {node: [way for way, end in ways.items() if node in way and end != OK] for node in tested}
    partners = {node: len({*sum(bad[node], ())} - {node}) for node in tested}
    lost = {node for node in tested if 2 * partners[node] > len(tested) - 1}
    lost = lost if 2 * len(lost) < len(tested) else set()

    def judge(node: str) -> Finding:
        check, others = Check(node, PAIRS, f"TCP to and from all {len(tested) - 1} others"), len(tested) - 1
        if node in absent:
            return check.expecting("").unknown(f"not tested: {absent[node]}", "see net.interface and host.python")
        if not others:
            return check.unknown("no other node could be tested")
        counting = [way for way in bad[node] if node in lost or not lost.intersection(way)]
        if counting:
            text = ", ".join(f"{one} → {other} {ways[one, other]}" for one, other in counting[:_NAMED])
            text += f" and {len(counting) - _NAMED} more" if len(counting) > _NAMED else ""
            prefix = f"cut off from {partners[node]} of {others} others: " if node in lost else ""
            return check.fail(prefix + text, _REMEDY)
        untried = [other for other in tested if other != node and (node, other) not in ways]
        if untried:
            return check.unknown(f"{len(untried)} of {others} not tried", "run the check again")
        gone = f"; {', '.join(sorted(lost)[:_NAMED])} cut off" if lost else ""
        return check.ok(f"reaches {others - len(lost)} of {others} others{gone}")

    return [judge(node) for node in nodes]


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


def _compare_machines(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """One finding for every node; one machine under two names fails under the second."""
    first: dict[str, str] = {}
    found = []
    for node, facts in nodes.items():
        check, network = Check(node, MACHINE, "a machine of its own"), known(_network, facts)
        if network is None or not network.machine:
            found.append(check.expecting("").skip("the node does not tell which machine it is"))
            continue
        other = first.setdefault(network.machine, node)
        if other == node:
            found.append(check.expecting("").ok("a machine of its own"))
            continue
        remedy = f"name it once: leave {node} out, or correct its address in ~/.ssh/config or DNS"
        evidence = f"boot id and network namespace: {network.machine}"
        found.append(check.fail(f"{node} and {other} are the same machine", remedy, evidence))
    return found


def _network(facts: NodeFacts) -> Network:
    return facts.network


def _between(config: ClusterConfig) -> Mapping[str, TestBetween]:
    """Connects of all pairs."""

    def test(connections: Mapping[str, Connection], nodes: Mapping[str, NodeFacts]) -> list[Finding]:
        chosen = {node: known(_interface, facts) for node, facts in nodes.items()}
        return check_pairs(connections, {node: (one and one.address) or "" for node, one in chosen.items()})

    return {PAIRS: test}


GROUPS = (
    CheckGroup(
        "net",
        (check_interface,),
        questions=(LINKS,),
        traits=_traits,
        compare=_compare_machines,
        between=_between,
        compared={
            MACHINE: "Every name leads to another machine: no two have the same boot id and network namespace.",
            "net.mtu": "These interfaces have one MTU; different ones lose large packets without a word.",
            PAIRS: "Every node can open a TCP connection to every other, in both directions.",
        },
    ),
)
