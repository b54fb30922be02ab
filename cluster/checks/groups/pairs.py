"""All nodes against all: does a TCP connection work from each to each other, in both directions?

On every node runs a program (`cluster.agent.pairs`), started over SSH, gone when we are.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.agent.messages import Message
from cluster.checks.finding import Check, Finding
from cluster.code import NodeProgram
from cluster.errors import ClusterError, SshError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import fan_out
from engine.config.errors import BurstError

CHECK = "net.pairs"
START_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 3.0
# Connections that one node opens at the same time, and nodes that do so.
WIDTH = 64
_AGENT = ("cluster.agent.pairs", "burst-pairs")
_SLACK_S = 15.0
_NAMED = 8
_OK, _UNTRIED = "ok", "not tried"
_REMEDY = "look for a firewall between them, a cable or switch port, and the right cluster.interface"


class UntestedError(ClusterError):
    """A node that takes no part; `remedy` says what to do."""

    def __init__(self, text: str, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(text)


@dataclass(frozen=True)
class Link:
    """One direction of a pair. kind: ok, refused, timeout, unreachable, reset, ...; delay_ms: of a greeting."""

    source: str
    target: str
    kind: str
    detail: str = ""
    delay_ms: float = 0.0

    @property
    def is_broken(self) -> bool:
        """Whether it was tried and does not work."""
        return self.kind not in (_OK, _UNTRIED)


def check_pairs(
    connections: Mapping[str, Connection],
    addresses: Mapping[str, str],
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
) -> list[Finding]:
    """net.pairs of every node. N nodes make N * (N - 1) connections, at most WIDTH at a time from one node.

    addresses: by node, IPv4 or IPv6, with or without prefix length; empty where none was chosen. A node without agent
    is UNKNOWN and is not part of any pair.
    """
    nodes, token = list(connections), secrets.token_hex(32)
    waves = math.ceil(len(nodes) / WIDTH)
    agents: dict[str, NodeProgram] = {}
    places: dict[str, tuple[str, int]] = {}

    def start(node: str) -> None:
        address = addresses.get(node, "").partition("/")[0]
        if not address:
            raise UntestedError("no address to test was chosen", "see the findings of group net, and cluster.interface")
        agents[node] = NodeProgram(connections[node], words=_AGENT)
        told = agents[node].ask({"listen": {"address": address, "token": token}}, silence_s=start_timeout_s)[0]
        port = told.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            why = f"cannot listen on {address}: {one_line(str(told.get('error')))}"
            raise UntestedError(why, "give the nodes addresses of their own: see cluster.interface")
        places[node] = address, port

    def connect(node: str) -> list[Link]:
        # Each node begins with the one after it: else all would begin with the first.
        others = [*ready[ready.index(node) + 1 :], *ready[: ready.index(node)]]
        if not others:
            return []
        targets = [(other, *places[other]) for other in others]
        question: Message = {"greet": {"targets": targets, "timeout_s": timeout_s, "width": WIDTH}}
        return read_links(node, others, agents[node].ask(question, silence_s=timeout_s * waves + _SLACK_S)[0])

    hosts = [replace(connection.host, name=node) for node, connection in connections.items()]
    try:
        started = fan_out(hosts, lambda host: start(host.name))
        absent = {node: outcome.error for node, outcome in started.items() if outcome.error is not None}
        ready = [node for node in nodes if node not in absent]
        asked = fan_out([host for host in hosts if host.name in ready], lambda host: connect(host.name), width=WIDTH)
    finally:
        for agent in list(agents.values()):
            agent.close()
    links: list[Link] = []
    for node, outcome in asked.items():
        why = one_line(str(outcome.error))
        links += outcome.value or [Link(node, other, _UNTRIED, why) for other in ready if other != node]
    return judge_pairs(nodes, links, absent)


def read_links(source: str, targets: Sequence[str], answer: Mapping[str, object]) -> list[Link]:
    """One link per target, whatever the answer of an agent holds: what it does not tell was not tried."""
    found: dict[str, Link] = {}
    results = answer.get("results")
    for row in results if isinstance(results, list) else ():
        if isinstance(row, list) and len(row) == 4 and row[0] in targets and isinstance(row[3], int | float):
            found[row[0]] = Link(source, row[0], one_line(str(row[1]), 40), one_line(str(row[2])), float(row[3]))
    return [found.get(target, Link(source, target, _UNTRIED, "the agent did not say")) for target in targets]


def judge_pairs(nodes: Sequence[str], links: Iterable[Link], absent: Mapping[str, BurstError]) -> list[Finding]:
    """One finding per node. A broken pair is told at both its ends, unless one end is cut off from most others: then it
    is that node's fault alone."""
    by_pair = {(link.source, link.target): link for link in links}
    tested = [node for node in nodes if node not in absent]
    lost = cut_off_nodes(tested, {frozenset(pair) for pair, link in by_pair.items() if link.is_broken})
    found = []
    for node in nodes:
        check = Check(node, CHECK, f"TCP to and from all {len(tested) - 1} others")
        if node in absent:
            error = absent[node]
            text = error.detail if isinstance(error, SshError) else str(error)
            found.append(check.expecting("").unknown(f"not tested: {one_line(text)}", getattr(error, "remedy", "")))
        else:
            found.append(_judge_node(check, [other for other in tested if other != node], by_pair, lost))
    return found


def cut_off_nodes(nodes: Collection[str], broken: Collection[frozenset[str]]) -> frozenset[str]:
    """The nodes that are cut off from more than half of the others, as long as they are the fewer."""
    lost: set[str] = set()
    while True:
        counts = {node: sum(node in pair for pair in broken if not pair & lost) for node in nodes if node not in lost}
        most = max(counts.values(), default=0)
        worst = {node for node, count in counts.items() if count == most}
        too_many = 2 * (len(lost) + len(worst)) >= len(nodes)
        if 2 * most <= len(nodes) - 1 - len(lost) or too_many:
            return frozenset(lost)
        lost |= worst


def _judge_node(
    check: Check, others: Sequence[str], links: Mapping[tuple[str, str], Link], lost: frozenset[str]
) -> Finding:
    if not others:
        return check.unknown("no other node could be tested")
    node = check.node
    ways = [links.get(way, Link(*way, _UNTRIED)) for other in others for way in ((node, other), (other, node))]
    bad = [link for link in ways if link.is_broken]
    counting = bad if node in lost else [link for link in bad if not {link.source, link.target} & lost]
    if counting:
        text = ", ".join(f"{link.source} → {link.target} {link.kind}" for link in counting[:_NAMED])
        text += f" and {len(counting) - _NAMED} more" if len(counting) > _NAMED else ""
        if node in lost:
            partners = {link.source for link in bad} | {link.target for link in bad}
            text = f"cut off from {len(partners) - 1} of {len(others)} others: {text}"
        return check.fail(text, _REMEDY, counting[0].detail)
    untried = [link for link in ways if link.kind == _UNTRIED and link.source == node]
    if untried:
        return check.unknown(f"{len(untried)} of {len(others)} not tried: {untried[0].detail}", "run the check again")
    slowest = max((link.delay_ms for link in ways if link.kind == _OK), default=0.0)
    gone = sorted(lost - {node})
    text = f"reaches {len(others) - len(gone)} of {len(others)} others, slowest in {slowest:.1f} ms"
    return check.ok(f"{text}; {', '.join(gone[:_NAMED])} cut off" if gone else text)
