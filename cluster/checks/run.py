"""The whole check of a fleet: every node by itself and all at once, then what only several nodes together tell.

reach, ask, judge      each node in a thread of its own, bounded by its own timeouts
compare                traits, clocks: pure, from the answers
between nodes          connects of all pairs, the shared folder: over the connections that are still open
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.checks.check import (
    PROBE,
    REACH,
    Check,
    CheckGroup,
    Finding,
    FleetReport,
    NodeReport,
    Selection,
    TestBetween,
    Verdict,
    broken,
    worst,
)
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Connect, Connection
from cluster.ssh.hosts import Host, Outcome, fan_out, fold_nodes
from cluster.survey.facts import DEFAULT_TIMEOUT_S, NodeFacts, survey_here, survey_node
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError

if TYPE_CHECKING:
    from cluster.ssh.session import SshPool

EXPLANATIONS: Mapping[str, str] = {
    REACH: "The node could be reached over SSH and showed the host key that is known; if not, which step failed.",
    PROBE: "The node's answer came whole. If not, every check that rests on a missing part is UNKNOWN.",
    "ssh.clock": "The node's clock against the median of all nodes (of fewer than three: against this machine): logs "
    "of several nodes can only be compared with equal clocks.",
}
SKEW_WARN_S = 1.0
SKEW_FAIL_S = 5.0
_QUORUM = 3  # clocks that can outvote ours
# Where the error itself knows no remedy.
_REMEDIES = {
    SshFailure.UNREACHABLE: "check cables, routes and the jump host",
    SshFailure.TIMEOUT: "look at the node's console: is it up, is it overloaded?",
    SshFailure.PROTOCOL: "check that the port belongs to sshd",
    SshFailure.LOST: "look at the node's console and its kernel log",
    SshFailure.COMMAND_TIMEOUT: "look at the load, and for processes in state D, on the node",
}
# Of these 0 is never right where another node has some.
COUNTS = frozenset({"gpu.count", "ib.count"})
# A difference in these makes a run slow, and is no reason to leave the node out.
SOFT_CHECKS = frozenset({"gpu.power_limit", "gpu.clocks", "gpu.pcie"})
_VALUE_LIMIT = 120


class CheckObserver:
    """Is told what happens while a check runs, in the caller's thread, and does nothing."""

    def finished(self, report: NodeReport) -> None:
        """The node's own checks are done; what is between nodes may still add to them."""

    def phase(self, text: str) -> None:
        """What is being done now, for all nodes."""


@dataclass(frozen=True)
class CheckOptions:
    """What is checked. all_groups: those that may be selected from. connect: instead of SSH."""

    all_groups: tuple[CheckGroup, ...]
    selection: Selection = field(default_factory=Selection)
    timeout_s: float = DEFAULT_TIMEOUT_S
    connect: Connect | None = None

    @property
    def groups(self) -> tuple[CheckGroup, ...]:
        """The groups that nodes are asked about: those with a check that is wanted."""
        return tuple(group for group in self.all_groups if any(map(self.selection.wants, group.explanations())))

    def question(self, config: ClusterConfig) -> Mapping[str, Any]:
        """What every node is asked, as arguments of `survey_node`."""
        told = {name: value for group in self.groups for name, value in group.settings(config).items()}
        questions = [question for group in self.groups for question in group.questions]
        settings = {name: value for name, value in told.items() if value}
        return {"questions": questions, "settings": settings, "timeout_s": self.timeout_s}

    def tests_between(self, config: ClusterConfig) -> Mapping[str, TestBetween]:
        """The tests between nodes that are asked for and can be made, by check."""
        tests = {name: test for group in self.groups for name, test in group.between(config).items()}
        return {name: test for name, test in tests.items() if self.selection.wants(name)}


@dataclass(frozen=True)
class _Node:
    """What is known of one node. facts: None when it could not be asked. traits: what all nodes must have alike."""

    findings: tuple[Finding, ...]
    facts: NodeFacts | None = None
    traits: Mapping[str, str] = field(default_factory=dict)


def check_nodes(
    hosts: Sequence[Host],
    config: ClusterConfig,
    options: CheckOptions,
    observer: CheckObserver | None = None,
) -> FleetReport:
    """The report on all `hosts`, in their order. No node delays or hides another: each ends by its own timeouts."""
    observer, begin = observer or CheckObserver(), time.monotonic()
    between, question = options.tests_between(config), options.question(config)
    tests = between if len(hosts) > 1 else {}
    kept: dict[str, Connection] = {}

    def work(host: Host) -> _Node:
        try:
            with contextlib.ExitStack() as own:
                connection = own.enter_context(connect(host))
                probe = survey_node(connection, **question)
                if tests:
                    kept[host.name] = connection
                    own.pop_all()
        except BurstError:
            raise
        except Exception as error:
            # Whatever a strange server makes a library stumble over is the matter of that node alone.
            return _Node((broken(Check(host.name, REACH), error),))
        return _judge(NodeFacts(probe, config), answer_findings(probe), options.groups)

    def tell(outcome: Outcome[_Node]) -> None:
        found = tuple(one for one in _node(outcome).findings if options.selection.wants(one.check))
        observer.finished(NodeReport(outcome.host.name, found, outcome.elapsed_s))

    with contextlib.ExitStack() as stack:
        connect = options.connect or stack.enter_context(_pool()).connect
        stack.callback(_close, kept)
        outcomes = fan_out(hosts, work, on_outcome=tell)
        nodes = {name: _node(outcome) for name, outcome in outcomes.items()}
        observer.phase("comparing nodes")
        findings, notes = _compare(nodes, options.groups)
        if tests:
            observer.phase("testing between nodes")
        for finding in _test_between(tests, kept, nodes):
            findings[finding.node].append(finding)
    reports = {
        name: NodeReport(name, options.selection.apply(name, findings[name], between), outcome.elapsed_s)
        for name, outcome in outcomes.items()
    }
    facts = {name: node.facts for name, node in nodes.items() if node.facts is not None}
    return FleetReport(reports, time.monotonic() - begin, notes, facts)


def _pool() -> SshPool:
    from cluster.ssh.session import SshPool  # nodes behind the same jump host share one login there

    return SshPool()


def _close(connections: Mapping[str, Connection]) -> None:
    for connection in list(connections.values()):
        with contextlib.suppress(SshError, OSError):
            connection.close()


def check_this_machine(config: ClusterConfig, options: CheckOptions) -> FleetReport:
    """The report on this machine alone, without SSH; a launch here takes this very Python for its ranks."""
    config = replace(config, python=config.python or sys.executable)
    begin = time.monotonic()
    probe = survey_here(**options.question(config))
    node = _judge(NodeFacts(probe, config), answer_findings(probe)[1:], options.groups)
    findings, notes = _compare({probe.node: node}, options.groups, clocks=False)
    elapsed_s = time.monotonic() - begin
    found = options.selection.apply(probe.node, findings[probe.node], options.tests_between(config))
    return FleetReport({probe.node: NodeReport(probe.node, found, elapsed_s)}, elapsed_s, notes)


def _node(outcome: Outcome[_Node]) -> _Node:
    return outcome.value or _Node((reach_finding(outcome.error, outcome.host.name),))


def _judge(facts: NodeFacts, findings: Iterable[Finding], groups: Sequence[CheckGroup]) -> _Node:
    """`findings` with those of all groups, and what is to be compared; a group that breaks is UNKNOWN."""
    found, traits = [*findings], dict[str, str]()
    for group in groups:
        try:
            found += group.check(facts)
            traits |= group.told(facts)
        except Exception as error:
            found.append(broken(Check(facts.node, group.name), error))
    return _Node(tuple(found), replace(facts), traits)  # what was read of the answer takes ten times its room


def _compare(
    nodes: Mapping[str, _Node], groups: Sequence[CheckGroup], *, clocks: bool = True
) -> tuple[dict[str, list[Finding]], tuple[str, ...]]:
    """(findings of nodes with what a look at all of them adds, what is wrong with this machine).

    Only nodes that answered are compared.
    """
    told = {name: node.facts for name, node in nodes.items() if node.facts is not None}
    added = profile_findings({name: nodes[name].traits for name in told})
    for group in groups:
        added += _guarded(group.name, told, partial(group.compare, told))
    skews, note = clock_findings([facts.probe for facts in told.values()]) if clocks else ([], "")
    added += skews
    by_node: dict[str, list[Finding]] = {name: [] for name in nodes}
    for finding in added:
        by_node[finding.node].append(finding)
    merged = {name: merge_compared(node.findings, by_node[name]) for name, node in nodes.items()}
    return merged, (note,) if note else ()


def _test_between(
    tests: Mapping[str, TestBetween], connections: Mapping[str, Connection], nodes: Mapping[str, _Node]
) -> list[Finding]:
    """The tests that need several nodes at once, over their open connections; with fewer than two there are none."""
    told = {name: node.facts for name, node in nodes.items() if node.facts is not None and name in connections}
    if len(told) < 2:
        return []
    reached = {name: connections[name] for name in told}
    return [finding for name, test in tests.items() for finding in _guarded(name, told, partial(test, reached, told))]


def _guarded(check: str, nodes: Iterable[str], test: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of `test`; when it breaks, UNKNOWN for every node, and what is known already is not lost."""
    try:
        return test()
    except Exception as error:
        return [broken(Check(node, check), error) for node in nodes]


def reach_finding(error: BurstError | None, node: str) -> Finding:
    """FAIL: the node could not be reached; which of the many ways, and what to do about this one."""
    check = Check(node, REACH, "a connection")
    if not isinstance(error, SshError):
        return check.fail(one_line(str(error), 400), "")
    remedy = one_line(error.remedy, 400) or _REMEDIES.get(error.kind, "")
    return check.fail(one_line(error.detail, 400), remedy, error.kind.value)


def answer_findings(probe: NodeProbe) -> list[Finding]:
    """Findings of one node that was reached: that it was, then whether its answer is whole."""
    findings = [Check(probe.node, REACH).ok("reached, its host key is the known one")]
    if probe.trouble:
        remedy = "run it again; look at the node's load and kernel log; more time: --timeout"
        check = Check(probe.node, PROBE, "a complete answer")
        findings.append(check.unknown(one_line(probe.trouble, 400), remedy))
    return findings


def clock_findings(probes: Sequence[NodeProbe]) -> tuple[list[Finding], str]:
    """(one finding per node, what is wrong with the clock of this machine).

    A node is compared with the median of all nodes where there are three or more, else with this machine: what a run
    needs is that the nodes agree, and a wrong clock here must not condemn them all. How exactly a clock can be read at
    all, half a round trip, counts for the node.
    """
    offsets: Mapping[str, float] = {p.node: p.clock_offset_s for p in probes if p.clock_offset_s is not None}
    by_vote = len(offsets) >= _QUORUM
    middle = statistics.median(offsets.values()) if by_vote else 0.0
    reference = "most nodes" if by_vote else "this machine"
    findings = [_clock(probe, middle, reference) for probe in probes]
    if abs(middle) <= SKEW_WARN_S:
        return findings, ""
    word = "behind" if middle > 0 else "ahead of"
    return findings, f"the clock of this machine is {abs(middle):.3g} s {word} those of the nodes"


def _clock(probe: NodeProbe, middle: float, reference: str) -> Finding:
    check = Check(probe.node, "ssh.clock", f"within {SKEW_WARN_S:g} s of {reference}")
    if probe.clock_offset_s is None:
        return check.unknown("the node told no time that makes sense", "does `date +%s.%N` work there?")
    skew = probe.clock_offset_s - middle
    sure = abs(skew) - probe.clock_error_s
    if sure <= SKEW_WARN_S:
        return check.ok(f"within {SKEW_WARN_S:g} s")
    text = f"its clock is {abs(skew):.3g} s {'ahead of' if skew > 0 else 'behind'} {reference}"
    return (check.fail if sure > SKEW_FAIL_S else check.warn)(text, "start chrony or ntpd on the node")


def profile_findings(traits: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """A finding for every trait of every node that was asked. traits: node -> check -> value.

    Of different values those of most nodes are right, and without a majority nobody is (WARN on all). A node that does
    not tell what others tell is UNKNOWN.
    """
    checks = sorted({check for told in traits.values() for check in told})
    return [
        finding
        for check in checks
        for finding in _compare_values(check, {node: told.get(check) for node, told in traits.items()})
    ]


def merge_compared(own: Sequence[Finding], compared: Iterable[Finding]) -> list[Finding]:
    """The node's `own` findings with what comparing nodes says of it, without saying the same thing twice.

    Its own check looked closer: what that found stays, unless the comparison finds worse; only an OK gives way. Where a
    value is missing, that is UNKNOWN unless the check does not apply there (SKIP), or its group has already said why.
    """
    known = {check: worst(f.severity for f in own if f.check == check) for check in {f.check for f in own}}
    in_trouble = {_group(finding.check) for finding in own if finding.severity in (Verdict.FAIL, Verdict.UNKNOWN)}
    worse = []
    for finding in compared:
        before = known.get(finding.check)
        untold = finding.severity is Verdict.UNKNOWN and (before is Verdict.SKIP or _group(finding.check) in in_trouble)
        if not untold and (before is None or max(before.rank, Verdict.OK.rank) < finding.severity.rank):
            worse.append(finding)
    failed = {_group(finding.check) for finding in worse if finding.severity is Verdict.FAIL}
    worse = [f for f in worse if f.severity is not Verdict.UNKNOWN or _group(f.check) not in failed]
    replaced = {finding.check for finding in worse}
    kept = [f for f in own if f.check not in replaced or f.severity is not Verdict.OK or f.device is not None]
    return [*kept, *worse]


def _group(check: str) -> str:
    return check.partition(".")[0]


def _compare_values(check: str, values: Mapping[str, str | None]) -> Iterable[Finding]:
    told = [value for value in values.values() if value is not None]
    ranking = Counter(told).most_common(2)
    usual, votes = ranking[0]
    tied = len(ranking) == 2 and ranking[1][1] == votes
    if tied and "0" in told and check in COUNTS:
        # Nothing against something is no matter of taste, whatever the number of nodes on each side.
        usual, votes = next(item for item in ranking if item[0] != "0")
        tied = False
    expected = _sides(values) if tied else f"{_short(usual)}, as {votes} of {len(told)} nodes have"
    odd = Verdict.WARN if tied or check in SOFT_CHECKS else Verdict.FAIL
    for node, value in values.items():
        report = Check(node, check, "" if len(values) == 1 else expected)
        if value is None:
            yield report.unknown("the node did not tell", "see its other findings")
        elif value != usual or tied:
            yield report.finding(odd, _short(value), _remedy(check))
        else:
            yield report.ok(_short(value))


def _sides(values: Mapping[str, str | None]) -> str:
    """Who has what, when no value has a majority."""
    sides: dict[str, list[str]] = {}
    for node, value in values.items():
        if value is not None:
            sides.setdefault(value, []).append(node)
    shown = "; ".join(f"{_short(value)} on {fold_nodes(nodes)}" for value, nodes in list(sides.items())[:4])
    return f"the same on all nodes, but no value has a majority: {shown}"


def _remedy(check: str) -> str:
    name = check.partition(".")[2].replace("_", " ")
    return f"make {name} the same on all nodes, or leave the odd ones out"


def _short(value: str) -> str:
    return one_line(value, _VALUE_LIMIT)
