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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cluster.access.connection import Connection
from cluster.access.fanout import Outcome, fan_out
from cluster.access.hosts import Host
from cluster.checks.finding import Finding, Verdict
from cluster.checks.fleet import PAIRS, SHARED, NodeView, Wanted, by_node, check_between, compare_nodes, read_traits
from cluster.checks.groups import LoadedGroup, load_groups
from cluster.checks.selection import REACH, Selection
from cluster.checks.ssh import answer_findings, incomplete_finding, reach_finding
from cluster.checks.verdicts import FleetReport, NodeReport
from cluster.errors import SshError, SshFailure
from cluster.probe.run import DEFAULT_TIMEOUT_S, probe_local, probe_node
from cluster.probe.section import NodeProbe
from cluster.remote_text import one_line
from engine.config_cluster import ClusterConfig
from engine.errors import BurstError, ConfigError

Connect = Callable[[Host], Connection]


class CheckObserver(Protocol):
    """What is told while a check runs. `started` comes from the threads of the nodes, the rest from the caller's."""

    def started(self, node: str) -> None:
        """Work on the node begins."""

    def finished(self, report: NodeReport) -> None:
        """The node's own checks are done; what is between nodes may still add to them."""

    def phase(self, text: str) -> None:
        """What is being done now, for all nodes."""


class SilentObserver:
    """Tells nobody."""

    def started(self, node: str) -> None:
        """Nothing."""

    def finished(self, report: NodeReport) -> None:
        """Nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class CheckOptions:
    """What is checked. groups: None: those of the selection.
    cuda_smoke: try CUDA inside the image of the configuration, which takes time of its own on top of `timeout_s`.
    """

    selection: Selection = field(default_factory=Selection)
    timeout_s: float = DEFAULT_TIMEOUT_S
    cuda_smoke: bool = False
    groups: tuple[LoadedGroup, ...] | None = None
    connect: Connect | None = None

    def loaded_groups(self) -> tuple[LoadedGroup, ...]:
        """The groups that nodes are asked about."""
        return load_groups(self.selection.groups) if self.groups is None else self.groups

    def between_nodes(self, config: ClusterConfig) -> Wanted:
        """The tests between nodes that are asked for and can be made."""
        asks_net = any(group.name == "net" for group in self.loaded_groups())
        shared = config.shared_folder is not None and self.selection.wants(SHARED)
        return Wanted(asks_net and self.selection.wants(PAIRS), shared)


@dataclass(frozen=True)
class _Question:
    """Everything that every node is asked."""

    groups: tuple[LoadedGroup, ...]
    settings: Mapping[str, str]
    fragments: tuple[str, ...]
    timeout_s: float

    @classmethod
    def of(cls, config: ClusterConfig, options: CheckOptions) -> _Question:
        """As these options have it. Raises ConfigError where CUDA is to be tried without an image."""
        groups, timeout_s = options.loaded_groups(), options.timeout_s
        settings = {name: value for group in groups for name, value in group.probe_settings(config).items()}
        if not options.cuda_smoke:
            return cls(groups, settings, (), timeout_s)
        from cluster.checks.gpu_smoke import SMOKE_SECONDS, cuda_smoke_section

        try:
            section = cuda_smoke_section(config.container)
        except ValueError as error:
            raise ConfigError(f"cluster.container cannot be used for trying CUDA: {error}") from error
        if section is None:
            raise ConfigError("CUDA is tried inside an image: set cluster.container.runtime=docker and .image=NAME:TAG")
        return cls(groups, settings, (section,), timeout_s + SMOKE_SECONDS)

    def ask(self, connection: Connection) -> NodeProbe:
        """The answer of one node."""
        names = [group.name for group in self.groups]
        return probe_node(connection, names, timeout_s=self.timeout_s, settings=self.settings, fragments=self.fragments)

    def ask_this_machine(self) -> NodeProbe:
        """The answer of this machine."""
        names = [group.name for group in self.groups]
        return probe_local(names, timeout_s=self.timeout_s, settings=self.settings, fragments=self.fragments)


def check_nodes(
    hosts: Sequence[Host],
    config: ClusterConfig,
    options: CheckOptions | None = None,
    observer: CheckObserver | None = None,
) -> FleetReport:
    """The report on all `hosts`, in their order. No node delays or hides another: each ends by its own timeouts."""
    options, observer = options or CheckOptions(), observer or SilentObserver()
    begin = time.monotonic()
    question, wanted = _Question.of(config, options), options.between_nodes(config)
    with _Connections(options.connect, keep=wanted.any and len(hosts) > 1) as connections:
        outcomes = _visit_all(hosts, _Visitor(question, config, options, connections), observer)
        views = {name: _view_of(outcome) for name, outcome in outcomes.items()}
        observer.phase("comparing nodes")
        compared = compare_nodes(views, question.groups, config)
        if wanted.any:
            observer.phase("testing between nodes")
        between = check_between(connections.opened, views, config, wanted)
    reports, added = {}, by_node(between)
    for name, outcome in outcomes.items():
        found = (*compared.findings[name], *added.get(name, ()))
        reports[name] = NodeReport(name, _select(options.selection, name, found), outcome.elapsed_s)
    return FleetReport(reports, time.monotonic() - begin, compared.notes)


def check_this_machine(config: ClusterConfig, options: CheckOptions | None = None) -> FleetReport:
    """The report on this machine alone, without SSH; a launch here takes this very Python for its ranks."""
    config, options = replace(config, python=config.python or sys.executable), options or CheckOptions()
    begin = time.monotonic()
    question = _Question.of(config, options)
    probe = question.ask_this_machine()
    own = _judge(probe, question.groups, config)
    if probe.trouble:
        own.append(incomplete_finding(probe))
    views = {probe.node: NodeView(tuple(own), probe, read_traits(probe, question.groups))}
    compared = compare_nodes(views, question.groups, config, clocks=False)
    found = _select(options.selection, probe.node, compared.findings[probe.node])
    reports = {probe.node: NodeReport(probe.node, found, time.monotonic() - begin)}
    return FleetReport(reports, time.monotonic() - begin, compared.notes)


class _Connections:
    """Connects to nodes and closes everything in the end, also what a thread of an interrupted check still uses."""

    def __init__(self, connect: Connect | None, *, keep: bool) -> None:
        self._given, self.keep = connect, keep
        self._exit = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._is_closed = False
        self.opened: dict[str, Connection] = {}

    def open(self, host: Host) -> Connection:
        """A new connection, kept."""
        connection = self._connect(host)
        with self._lock:
            if not self._is_closed:
                self.opened[host.name] = connection
                return connection
        connection.close()
        raise SshError(host.name, SshFailure.LOST, "the check was interrupted")

    def drop(self, host: Host) -> None:
        """Close the connection to `host` now."""
        with self._lock:
            connection = self.opened.pop(host.name, None)
        if connection is not None:
            connection.close()

    def __enter__(self) -> _Connections:
        self._connect = self._given or self._open_pool()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            connections, self.opened = list(self.opened.values()), {}
        for connection in connections:
            with contextlib.suppress(SshError, OSError):
                connection.close()
        self._exit.close()

    def _open_pool(self) -> Connect:
        """Connects over SSH; nodes behind the same jump host share one login there."""
        from cluster.access.ssh import SshPool

        return self._exit.enter_context(SshPool()).connect


@dataclass(frozen=True)
class _Visitor:
    """Reaches, asks and judges one node."""

    question: _Question
    config: ClusterConfig
    options: CheckOptions
    connections: _Connections

    def visit(self, host: Host) -> NodeView:
        """What the node said. Its connection stays open where it is needed again."""
        try:
            probe = self.question.ask(self.connections.open(host))
        except SshError as error:
            self.connections.drop(host)
            return NodeView((reach_finding(error, host.name),))
        except BurstError:
            raise
        except Exception as error:
            # Whatever a strange server makes a library stumble over is the matter of that node alone.
            self.connections.drop(host)
            return NodeView((_broken(REACH, host.name, error),))
        if not self.connections.keep:
            self.connections.drop(host)
        findings = (*answer_findings(probe), *_judge(probe, self.question.groups, self.config))
        return NodeView(findings, probe, read_traits(probe, self.question.groups))


def _visit_all(hosts: Sequence[Host], visitor: _Visitor, observer: CheckObserver) -> Mapping[str, Outcome[NodeView]]:
    """All nodes visited; the observer hears of each as soon as it is done."""

    def work(host: Host) -> NodeView:
        observer.started(host.name)
        return visitor.visit(host)

    def tell(outcome: Outcome[NodeView]) -> None:
        name = outcome.host.name
        found = _select(visitor.options.selection, name, _view_of(outcome).findings)
        observer.finished(NodeReport(name, found, outcome.elapsed_s))

    return fan_out(hosts, work, width=visitor.config.ssh.fan_out, on_outcome=tell)


def _view_of(outcome: Outcome[NodeView]) -> NodeView:
    if outcome.value is not None:
        return outcome.value
    text = one_line(str(outcome.error), 400)
    return NodeView((Finding(REACH, outcome.host.name, Verdict.FAIL, text, "a connection"),))


def _judge(probe: NodeProbe, groups: Sequence[LoadedGroup], config: ClusterConfig) -> list[Finding]:
    """Findings of all groups; a group that breaks on what this node said, or says nothing, is UNKNOWN."""
    findings: list[Finding] = []
    for loaded in groups:
        try:
            found = loaded.group.check(probe, config)
        except Exception as error:
            found = [_broken(loaded.name, probe.node, error)]
        nothing = Finding(loaded.name, probe.node, Verdict.UNKNOWN, "no check of this group gave a result")
        findings += found or [nothing]
    return findings


def _broken(check: str, node: str, error: BaseException) -> Finding:
    """UNKNOWN: a bug of ours, or an answer that nobody thought of; the place in the code is the evidence."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    text = one_line(f"the check broke: {type(error).__name__}: {error}", 300)
    return Finding(check, node, Verdict.UNKNOWN, text, "a result", "report this with the output of --json", None, place)


def _select(selection: Selection, node: str, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    wanted = selection.apply(findings)
    reached = not any(finding.check == REACH and finding.severity is not Verdict.OK for finding in wanted)
    return (*wanted, *(selection.missing(node, wanted) if reached else ()))


def watch(check: Callable[[], FleetReport], pause: Callable[[], None]) -> Iterator[FleetReport]:
    """One report after the other, with `pause` in between, until the reader has enough."""
    while True:
        yield check()
        pause()
