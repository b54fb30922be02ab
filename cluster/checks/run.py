"""The whole check of a fleet: every node by itself and all at once, then what only several nodes together tell.

reach, ask, judge      each node in a thread of its own, bounded by its own timeouts
compare                traits, clocks: pure, from the answers
between nodes          connects of all pairs, the shared folder: over the connections that are still open
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.checks.compare import merge_compared, profile_findings
from cluster.checks.finding import Check, Finding, FleetReport, NodeReport
from cluster.checks.group import CheckGroup, TestBetween, broken
from cluster.checks.selection import GROUPS, Selection
from cluster.checks.ssh import REACH, answer_findings, clock_findings, reach_finding
from cluster.errors import SshError
from cluster.ssh.connection import Connect, Connection
from cluster.ssh.hosts import Host, Outcome, fan_out
from cluster.survey.ask import DEFAULT_TIMEOUT_S, survey_here, survey_node
from cluster.survey.facts import NodeFacts
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError

if TYPE_CHECKING:
    from cluster.ssh.pool import SshPool


class CheckObserver:
    """Is told what happens while a check runs, in the caller's thread, and does nothing."""

    def finished(self, report: NodeReport) -> None:
        """The node's own checks are done; what is between nodes may still add to them."""

    def phase(self, text: str) -> None:
        """What is being done now, for all nodes."""


@dataclass(frozen=True)
class CheckOptions:
    """What is checked. all_groups: those that may be selected from. connect: instead of SSH."""

    selection: Selection = field(default_factory=Selection)
    timeout_s: float = DEFAULT_TIMEOUT_S
    all_groups: tuple[CheckGroup, ...] = GROUPS
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
    from cluster.ssh.pool import SshPool  # nodes behind the same jump host share one login there

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
