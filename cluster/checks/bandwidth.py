"""How fast nodes send to each other: real TCP transfers between all pairs, in both directions, as a matrix."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from cluster.access.connection import Connection
from cluster.checks.finding import Finding
from cluster.checks.pairs_agents import AgentError, PairAgent, running_agents
from cluster.checks.report import Report
from cluster.errors import SshError
from cluster.remote_text import one_line

CHECK = "net.bandwidth"
# Of what is usual between these nodes: below the first a link is odd, below the second it holds everybody up.
ODD_SHARE, BAD_SHARE = 0.7, 0.35
CONNECT_TIMEOUT_S = 5.0
# For what the buffers hold when a sender stops, on a slow link.
_DRAIN_S = 60.0
_NAMED = 6
_REMEDY = "compare cable, switch port, negotiated speed (ethtool) and MTU with those of the others"


@dataclass(frozen=True)
class PairRate:
    """One direction. gbps: Gbit/s as the receiver counted; None when it could not be measured, `problem` says why."""

    source: str
    target: str
    gbps: float | None
    problem: str = ""


@dataclass(frozen=True)
class BandwidthMatrix:
    """All directions between `nodes`. absent: why other nodes took no part. at_once: disjoint pairs sent together."""

    nodes: tuple[str, ...]
    rates: Mapping[tuple[str, str], PairRate]
    seconds: float
    streams: int
    at_once: bool = True
    absent: Mapping[str, str] = field(default_factory=dict)

    def gbps(self, source: str, target: str) -> float | None:
        """The rate of one direction; None when it is not known."""
        rate = self.rates.get((source, target))
        return None if rate is None else rate.gbps

    @property
    def minimum_gbps(self) -> float | None:
        """The slowest direction."""
        return min(self._known(), default=None)

    @property
    def median_gbps(self) -> float | None:
        """The median over all directions."""
        known = self._known()
        return statistics.median(known) if known else None

    @property
    def usual_gbps(self) -> float | None:
        """What a healthy link has: the upper median over nodes of each node's upper median.

        With one bad node of four, half of all directions are bad, so that the plain median would stand between good and
        bad; over nodes the three good ones decide.
        """
        by_node = [self.node_gbps(node) for node in self.nodes]
        known = [rate for rate in by_node if rate is not None]
        return statistics.median_high(known) if known else None

    def node_gbps(self, node: str) -> float | None:
        """The upper median over the directions from and to `node`."""
        known = [rate.gbps for rate in self.rates.values() if node in (rate.source, rate.target)]
        values = [value for value in known if value is not None]
        return statistics.median_high(values) if values else None

    def share(self, source: str, target: str) -> float | None:
        """The rate of a direction, relative to what is usual."""
        rate, usual = self.gbps(source, target), self.usual_gbps
        return rate / usual if rate is not None and usual else None

    def odd_nodes(self) -> tuple[str, ...]:
        """Nodes that are slow with most others: the fault is theirs, not that of a pair."""
        usual = self.usual_gbps or 0.0
        rates = {node: self.node_gbps(node) for node in self.nodes}
        return tuple(node for node, rate in rates.items() if rate is not None and rate < ODD_SHARE * usual)

    def odd_pairs(self) -> tuple[PairRate, ...]:
        """Slow directions between nodes that are not odd themselves, slowest first."""
        odd, usual = self.odd_nodes(), self.usual_gbps or 0.0
        found = [
            (rate.gbps, rate)
            for rate in self.rates.values()
            if rate.gbps is not None and rate.gbps < ODD_SHARE * usual and not {rate.source, rate.target} & set(odd)
        ]
        return tuple(rate for _, rate in sorted(found, key=lambda pair: pair[0]))

    def unmeasured(self) -> tuple[PairRate, ...]:
        """Directions without a figure."""
        return tuple(rate for rate in self.rates.values() if rate.gbps is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. Rates in Gbit/s, rows send, columns receive; null: not measured, or the same node."""
        return {
            "nodes": list(self.nodes),
            "gbps": [[self.gbps(source, target) for target in self.nodes] for source in self.nodes],
            "minimum_gbps": self.minimum_gbps,
            "median_gbps": self.median_gbps,
            "usual_gbps": self.usual_gbps,
            "odd_nodes": list(self.odd_nodes()),
            "odd_pairs": [
                {"source": rate.source, "target": rate.target, "gbps": rate.gbps} for rate in self.odd_pairs()
            ],
            "unmeasured": [
                {"source": rate.source, "target": rate.target, "problem": rate.problem} for rate in self.unmeasured()
            ],
            "absent": dict(self.absent),
            "seconds": self.seconds,
            "streams": self.streams,
            "at_once": self.at_once,
        }

    def _known(self) -> list[float]:
        return [rate.gbps for rate in self.rates.values() if rate.gbps is not None]


def plan_rounds(nodes: Sequence[str], *, at_once: bool = True) -> list[list[tuple[str, str]]]:
    """Every pair exactly once, in rounds in which no node is part of two pairs; a pair per round unless `at_once`.

    The way of round-robin tournaments: the first stays, the others move on by one place.

        round 0: a-d b-c    round 1: a-c d-b    round 2: a-b c-d
    """
    places: list[str | None] = list(nodes)
    if len(places) % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(one, other) for one, other in facing if one is not None and other is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds if at_once else [[pair] for pairs in rounds for pair in pairs]


def measure_bandwidth(
    connections: Mapping[str, Connection],
    addresses: Mapping[str, str],
    *,
    seconds: float = 2.0,
    streams: int = 4,
    on_pair: Callable[[PairRate], None] | None = None,
    at_once: bool = True,
) -> BandwidthMatrix:
    """Rates between all pairs on `addresses`, each direction for `seconds` over so many TCP connections.

    Disjoint pairs send at the same time (a switch must stand that, and N nodes take 2 * N * seconds); at_once=False
    lets one pair at a time have the network for itself. `on_pair` is told of every direction, in this thread.
    """
    nodes = list(connections)
    rounds = plan_rounds(nodes, at_once=at_once) if len(nodes) > 1 else []
    deadline_s = 60.0 + len(rounds) * 2 * (seconds + 2 * CONNECT_TIMEOUT_S + _DRAIN_S)
    rates: dict[tuple[str, str], PairRate] = {}
    with running_agents(connections, addresses, deadline_s) as group:
        for pairs in rounds:
            present = [pair for pair in pairs if pair[0] in group.agents and pair[1] in group.agents]
            _measure_round(group.agents, present, seconds, streams, lambda rate: _note(rates, rate, on_pair))
    taking_part = tuple(node for node in nodes if node in group.agents)
    absent = {node: _why(error) for node, error in group.absent.items()}
    return BandwidthMatrix(taking_part, rates, seconds, streams, at_once, absent)


def _note(rates: dict[tuple[str, str], PairRate], rate: PairRate, on_pair: Callable[[PairRate], None] | None) -> None:
    rates[rate.source, rate.target] = rate
    if on_pair is not None:
        on_pair(rate)


def _measure_round(
    agents: Mapping[str, PairAgent],
    pairs: Sequence[tuple[str, str]],
    seconds: float,
    streams: int,
    note: Callable[[PairRate], None],
) -> None:
    """One direction of every pair, then the other: a node never sends and receives at the same time."""
    if not pairs:
        return
    pool = ThreadPoolExecutor(max_workers=len(pairs), thread_name_prefix="bandwidth")
    try:
        for ways in (pairs, [(other, one) for one, other in pairs]):
            futures = [pool.submit(_measure, agents[one], agents[other], seconds, streams) for one, other in ways]
            for future in as_completed(futures):
                note(future.result())
    finally:
        # After an interrupt the agents end, and with them whoever waits for one.
        pool.shutdown(wait=False, cancel_futures=True)


def _measure(source: PairAgent, target: PairAgent, seconds: float, streams: int) -> PairRate:
    request = {
        "do": "send",
        "target": target.target,
        "seconds": seconds,
        "streams": streams,
        "timeout_s": CONNECT_TIMEOUT_S,
    }
    try:
        answer = source.ask(request, seconds + CONNECT_TIMEOUT_S * streams + _DRAIN_S)
    except (AgentError, SshError) as error:
        return PairRate(source.node, target.node, None, _why(error))
    rate = answer.get("bytes_per_s")
    if not isinstance(rate, int | float) or rate <= 0:
        why = one_line(f"{answer.get('error', 'no answer')} {answer.get('detail', '')}".strip())
        return PairRate(source.node, target.node, None, why)
    return PairRate(source.node, target.node, rate * 8e-9)


def _why(error: AgentError | SshError) -> str:
    return one_line(error.detail if isinstance(error, SshError) else str(error))


def bandwidth_findings(matrix: BandwidthMatrix, *, expected_gbps: float | None = None) -> list[Finding]:
    """net.bandwidth of every node: odd nodes and pairs against the rest, all against `expected_gbps` if it is given.

    A slow pair is told at both its ends; what a slow node does to others is told at that node alone.
    """
    found = [_judge_node(node, matrix, expected_gbps) for node in matrix.nodes]
    return found + [Report(node, CHECK).unknown(f"not measured: {why}") for node, why in matrix.absent.items()]


def _judge_node(node: str, matrix: BandwidthMatrix, expected_gbps: float | None) -> Finding:
    usual, rate = matrix.usual_gbps, matrix.node_gbps(node)
    unmeasured = [one for one in matrix.unmeasured() if node in (one.source, one.target)]
    report = Report(node, CHECK, f"about {usual:.3g} Gbit/s, the usual rate here" if usual else "")
    if rate is None or usual is None:
        return report.unknown(unmeasured[0].problem if unmeasured else "no other node could be measured")
    if node in matrix.odd_nodes():
        text = f"{rate:.3g} Gbit/s with most others"
        return report.fail(text, _REMEDY) if rate < BAD_SHARE * usual else report.warn(text, _REMEDY)
    odd = [one for one in matrix.odd_pairs() if node in (one.source, one.target)]
    if odd:
        text = _describe(odd)
        bad = (odd[0].gbps or 0.0) < BAD_SHARE * usual
        return report.fail(text, _REMEDY) if bad else report.warn(text, _REMEDY)
    if unmeasured:
        return report.unknown(_describe(unmeasured), "run the check again")
    if expected_gbps is not None and rate < ODD_SHARE * expected_gbps:
        return report.warn(f"{rate:.3g} Gbit/s, expected {expected_gbps:.3g}", _REMEDY)
    return report.ok(f"{rate:.3g} Gbit/s")


def _describe(rates: Sequence[PairRate]) -> str:
    shown = [
        f"{rate.source} → {rate.target} " + (rate.problem if rate.gbps is None else f"{rate.gbps:.3g} Gbit/s")
        for rate in rates[:_NAMED]
    ]
    return ", ".join(shown) + (f" and {len(rates) - _NAMED} more" if len(rates) > _NAMED else "")
