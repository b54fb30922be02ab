"""All nodes against all: does a TCP connection work from each to each other, in both directions?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.access.connection import Connection
from cluster.access.fanout import fan_out
from cluster.checks.finding import Finding
from cluster.checks.pairs_agents import START_TIMEOUT_S, AgentError, PairAgent, running_agents
from cluster.checks.report import Report
from cluster.errors import SshError
from cluster.remote_text import one_line

CHECK = "net.pairs"
CONNECT_TIMEOUT_S = 3.0
# Connections that one node opens at the same time.
WIDTH = 64
# Nodes that open connections at the same time.
SENDERS = 64
_SLACK_S = 15.0
_NAMED = 8
_OK = "ok"
_UNTRIED = "not tried"
_REMEDY = "look for a firewall between them, a cable or switch port, and the right cluster.interface"


@dataclass(frozen=True)
class Link:
    """One direction of a pair. kind: ok, refused, timeout, unreachable, reset, ...; delay_ms: of a greeting."""

    source: str
    target: str
    kind: str
    detail: str = ""
    delay_ms: float = 0.0

    @property
    def works(self) -> bool:
        """Whether the two agents spoke."""
        return self.kind == _OK


def check_pairs(
    connections: Mapping[str, Connection],
    addresses: Mapping[str, str],
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    width: int = WIDTH,
    start_timeout_s: float = START_TIMEOUT_S,
) -> list[Finding]:
    """net.pairs of every node. N nodes make N * (N - 1) connections, at most `width` at a time from one node.

    addresses: by node, as the net group chose them. A node without agent is UNKNOWN and is not part of any pair.
    """
    nodes = list(connections)
    if len(nodes) < 2:
        return [Report(node, CHECK).skip("one node has no pairs") for node in nodes]
    one_node_s = timeout_s * math.ceil(len(nodes) / width) + _SLACK_S
    deadline_s = one_node_s * math.ceil(len(nodes) / SENDERS) + 2 * _SLACK_S
    with running_agents(connections, addresses, deadline_s, start_timeout_s=start_timeout_s) as group:
        links = _connect_all(connections, group.agents, timeout_s, width, one_node_s)
    return judge_pairs(nodes, links, group.absent)


def _connect_all(
    connections: Mapping[str, Connection],
    agents: Mapping[str, PairAgent],
    timeout_s: float,
    width: int,
    one_node_s: float,
) -> list[Link]:
    names = list(agents)

    def connect(node: str) -> list[Link]:
        at = names.index(node)
        # Each node begins with the one after it: else all would begin with the first.
        targets = [agents[name].target for name in [*names[at + 1 :], *names[:at]]]
        if not targets:
            return []
        request = {"targets": targets, "timeout_s": timeout_s, "width": width}
        return read_links(node, [str(target[0]) for target in targets], agents[node].ask(request, one_node_s))

    hosts = [connections[node].host.with_name(node) for node in names]
    outcomes = fan_out(hosts, lambda host: connect(host.name), width=SENDERS)
    links: list[Link] = []
    for node, outcome in outcomes.items():
        why = one_line(str(outcome.error)) if outcome.error else ""
        links += outcome.value or [Link(node, other, _UNTRIED, why) for other in names if other != node]
    return links


def read_links(source: str, targets: Sequence[str], answer: Mapping[str, object]) -> list[Link]:
    """One link per target, whatever the answer of an agent holds: what it does not tell was not tried."""
    found: dict[str, Link] = {}
    results = answer.get("results")
    for row in results if isinstance(results, list) else ():
        if isinstance(row, list) and len(row) == 4 and row[0] in targets and isinstance(row[3], int | float):
            found[row[0]] = Link(source, row[0], one_line(str(row[1]), 40), one_line(str(row[2])), float(row[3]))
    detail = one_line(str(answer.get("detail", "the agent did not say")))
    return [found.get(target, Link(source, target, _UNTRIED, detail)) for target in targets]


def judge_pairs(
    nodes: Sequence[str], links: Iterable[Link], absent: Mapping[str, AgentError | SshError]
) -> list[Finding]:
    """One finding per node. A broken pair is told at both its ends, unless one end is cut off from most others: then it
    is that node's fault alone."""
    by_pair = {(link.source, link.target): link for link in links}
    tested = [node for node in nodes if node not in absent]
    broken = {frozenset(pair) for pair, link in by_pair.items() if not link.works and link.kind != _UNTRIED}
    lost = cut_off_nodes(tested, broken)
    return [
        _judge_absent(node, absent[node]) if node in absent else _judge_node(node, tested, by_pair, lost)
        for node in nodes
    ]


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


def _judge_absent(node: str, error: AgentError | SshError) -> Finding:
    text = error.detail if isinstance(error, SshError) else str(error)
    return Report(node, CHECK).unknown(f"not tested: {one_line(text)}", error.remedy)


def _judge_node(
    node: str, tested: Sequence[str], links: Mapping[tuple[str, str], Link], lost: frozenset[str]
) -> Finding:
    others = [other for other in tested if other != node]
    report = Report(node, CHECK, f"TCP to and from all {len(others)} others")
    if not others:
        return report.unknown("no other node could be tested")
    ways = [links.get(way, Link(*way, _UNTRIED)) for other in others for way in ((node, other), (other, node))]
    bad = [link for link in ways if not link.works and link.kind != _UNTRIED]
    counting = bad if node in lost else [link for link in bad if not {link.source, link.target} & lost]
    if counting:
        text = _describe(counting)
        if node in lost:
            partners = {link.source for link in bad} | {link.target for link in bad}
            text = f"cut off from {len(partners) - 1} of {len(others)} others: {text}"
        return report.fail(text, _REMEDY, counting[0].detail)
    untried = [link for link in ways if link.kind == _UNTRIED and link.source == node]
    if untried:
        return report.unknown(f"{len(untried)} of {len(others)} not tried: {untried[0].detail}", "run the check again")
    slowest = max((link.delay_ms for link in ways if link.works), default=0.0)
    gone = sorted(lost - {node})
    text = f"reaches {len(others) - len(gone)} of {len(others)} others, slowest in {slowest:.1f} ms"
    return report.ok(f"{text}; {', '.join(gone[:_NAMED])} cut off" if gone else text)


def _describe(links: Sequence[Link]) -> str:
    shown = [f"{link.source} → {link.target} {link.kind}" for link in links[:_NAMED]]
    rest = len(links) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
