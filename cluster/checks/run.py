"""The whole check of a fleet: every node by itself and all at once, then what only several nodes together tell.

reach, ask, judge      each node in a thread of its own, bounded by its own timeouts
compare                traits, clocks, memory, subnets: pure, from the answers
between nodes          connects of all pairs, the shared folder: over the connections that are still open
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cluster.checks.compare import merge_compared, profile_findings
from cluster.checks.finding import Check, Finding, FleetReport, NodeReport
from cluster.checks.group import CheckGroup, TestBetween, broken
from cluster.checks.groups.gpu_use import cuda_smoke_question
from cluster.checks.selection import GROUPS, Selection
from cluster.checks.ssh import REACH, answer_findings, clock_findings, reach_finding
from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host, Outcome, fan_out
from cluster.survey.ask import DEFAULT_TIMEOUT_S, survey_here, survey_node
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError

Connect = Callable[[Host], Connection]


class CheckObserver:
    """Is told what happens while a check runs, in the caller's thread, and does nothing."""

    def finished(self, report: NodeReport) -> None:
        """The node's own checks are done; what is between nodes may still add to them."""

    def phase(self, text: str) -> None:
        """What is being done now, for all nodes."""


@dataclass(frozen=True)
class CheckOptions:
    """What is checked. groups: those that may be selected from.
    cuda_smoke: try CUDA inside the image of the configuration, which takes time of its own on top of `timeout_s`.
    """

    selection: Selection = field(default_factory=Selection)
    timeout_s: float = DEFAULT_TIMEOUT_S
    cuda_smoke: bool = False
    all_groups: tuple[CheckGroup, ...] = GROUPS
    connect: Connect | None = None

    @property
    def groups(self) -> tuple[CheckGroup, ...]:
        """The groups that nodes are asked about: those with a check that is wanted."""
        return tuple(group for group in self.all_groups if any(map(self.selection.wants, group.explanations())))

    def question(self, config: ClusterConfig) -> Mapping[str, Any]:
        """What every node is asked, as arguments of `survey_node`.

        Raises ConfigError where CUDA is to be tried without an image.
        """
        told = {name: value for group in self.groups for name, value in group.settings(config).items()}
        questions = [question for group in self.groups for question in group.questions]
        timeout_s = self.timeout_s
        if self.cuda_smoke:
            questions.append(cuda_smoke_question(config.container))
            timeout_s += questions[-1].limit_s
        settings = {name: value for name, value in told.items() if value}
        return {"questions": questions, "settings": settings, "timeout_s": timeout_s}

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
    observer = observer or CheckObserver()
    begin = time.monotonic()
    tests, question = options.tests_between(config), options.question(config)
    with _Connections(options.connect, keep=bool(tests) and len(hosts) > 1) as connections:

        def work(host: Host) -> _Node:
            try:
                probe = connections.ask(host, question)
            except BurstError:
                raise
            except Exception as error:
                # Whatever a strange server makes a library stumble over is the matter of that node alone.
                return _Node((broken(Check(host.name, REACH), error),))
            return _judge(NodeFacts(probe, config), answer_findings(probe), options.groups)

        def tell(outcome: Outcome[_Node]) -> None:
            found = tuple(one for one in _node(outcome).findings if options.selection.wants(one.check))
            observer.finished(NodeReport(outcome.host.name, found, outcome.elapsed_s))

        def report(outcome: Outcome[_Node], findings: Sequence[Finding]) -> NodeReport:
            name = outcome.host.name
            return NodeReport(name, options.selection.apply(name, findings, tests), outcome.elapsed_s)

        outcomes = fan_out(hosts, work, on_outcome=tell)
        nodes = {name: _node(outcome) for name, outcome in outcomes.items()}
        observer.phase("comparing nodes")
        findings, notes = _compare(nodes, options.groups)
        if tests:
            observer.phase("testing between nodes")
        for finding in _test_between(tests, connections.opened, nodes):
            findings[finding.node].append(finding)
    reports = {name: report(outcome, findings[name]) for name, outcome in outcomes.items()}
    facts = {name: node.facts for name, node in nodes.items() if node.facts is not None}
    return FleetReport(reports, time.monotonic() - begin, notes, facts)


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


class _Connections:
    """Connects to nodes and closes everything in the end, also what a thread of an interrupted check still uses."""

    def __init__(self, connect: Connect | None, *, keep: bool) -> None:
        self._given, self._keep = connect, keep
        self._exit = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._is_closed = False
        self.opened: dict[str, Connection] = {}

    def ask(self, host: Host, question: Mapping[str, Any]) -> NodeProbe:
        """The answer of a node, whose connection stays open where it is needed again."""
        connection = self._connect(host)
        with self._lock:
            if self._is_closed:
                connection.close()
                raise SshError(host.name, SshFailure.LOST, "the check was interrupted")
            self.opened[host.name] = connection
        is_needed = False
        try:
            probe = survey_node(connection, **question)
            is_needed = self._keep
        finally:
            if not is_needed:
                with self._lock:
                    self.opened.pop(host.name, None)
                connection.close()
        return probe

    def __enter__(self) -> _Connections:
        from cluster.ssh.pool import SshPool  # nodes behind the same jump host share one login there

        self._connect = self._given or self._exit.enter_context(SshPool()).connect
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            connections, self.opened = list(self.opened.values()), {}
        for connection in connections:
            with contextlib.suppress(SshError, OSError):
                connection.close()
        self._exit.close()


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
    return _Node(tuple(found), facts, traits)


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
