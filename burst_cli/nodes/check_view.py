"""A check of nodes as people see it: a live table while it runs, then folded results. Text of nodes is never markup."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH
from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.fold import NodeFold, find_changed, fold_reports
from cluster.checks.run import CheckObserver
from cluster.ssh.nodes import fold_nodes

STYLES = {
    Verdict.OK: "green",
    Verdict.SKIP: "dim",
    Verdict.WARN: "yellow",
    Verdict.UNKNOWN: "magenta",
    Verdict.FAIL: "bold red",
}
_REFRESHES_PER_S = 4
_EACH_NODE_UP_TO = 32  # plain lines: beyond that only bad nodes
_LABEL_WIDTH = 8


@contextlib.contextmanager
def open_check_view(console: Console, nodes: Sequence[str], groups: Sequence[str]) -> Iterator[CheckObserver]:
    """What shows the check while it runs: a table on a terminal, lines anywhere else."""
    if not console.is_terminal:
        yield PlainCheckView(console, len(nodes))
        return
    view = LiveCheckView(console, nodes, groups)
    with Live(console=console, get_renderable=view.render, refresh_per_second=_REFRESHES_PER_S, transient=True):
        yield view


@dataclass
class _Row:
    """Where one node stands. started_s: None while it waits for its turn."""

    started_s: float | None = None
    report: NodeReport | None = None


class LiveCheckView(CheckObserver):
    """One line per node with a verdict per group; the bad ones first when not all lines fit."""

    def __init__(
        self,
        console: Console,
        nodes: Sequence[str],
        groups: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._groups = console, clock, ("ssh", *groups)
        self._rows = {node: _Row() for node in nodes}
        self._phase = ""
        self._lock = threading.Lock()

    def started(self, node: str) -> None:
        """Its seconds begin to count."""
        with self._lock:
            self._rows[node].started_s = self._clock()

    def finished(self, report: NodeReport) -> None:
        """Its verdicts appear."""
        with self._lock:
            self._rows[report.node].report = report

    def phase(self, text: str) -> None:
        """Shown below the table."""
        self._phase = text

    def render(self) -> RenderableType:
        """The table as it is now; called by the thread that refreshes the screen."""
        with self._lock:
            rows = [(node, replace(row)) for node, row in self._rows.items()]
        room = max(3, self._console.height - 5)
        shown = rows if len(rows) <= room else sorted(rows, key=_urgency)[:room]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("node", no_wrap=True)
        for group in self._groups:
            table.add_column(group, no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
        for node, row in shown:
            table.add_row(*self._cells(node, row))
        return Group(table, self._summary(rows, hidden=len(rows) - len(shown)))

    def _cells(self, node: str, row: _Row) -> list[Text]:
        if row.report is None:
            busy = row.started_s is not None
            word = Text("..." if busy else "", style="dim")
            seconds = f"{self._clock() - row.started_s:.0f}" if row.started_s is not None else ""
            return [Text(node, style="" if busy else "dim"), word, *[Text("")] * (len(self._groups) - 1), Text(seconds)]
        verdicts = [row.report.group_verdict(group) for group in self._groups]
        cells = [_verdict(verdict) if verdict else Text(DASH, style="dim") for verdict in verdicts]
        return [Text(node), *cells, Text(f"{row.report.elapsed_s:.1f}")]

    def _summary(self, rows: Sequence[tuple[str, _Row]], hidden: int) -> Text:
        reports = [row.report for _, row in rows if row.report is not None]
        usable = sum(report.usable for report in reports)
        parts = [f"{len(reports)} of {len(rows)} nodes checked, {usable} usable"]
        parts += [f"{hidden} more not shown"] if hidden else []
        parts += [self._phase] if self._phase else []
        return Text(" · ".join(parts), style="dim")


class PlainCheckView(CheckObserver):
    """A line per node as it is done; of a large fleet only the bad ones."""

    def __init__(self, console: Console, nodes: int) -> None:
        self._console, self._nodes, self._done = console, nodes, 0

    def finished(self, report: NodeReport) -> None:
        """One line, where it matters."""
        self._done += 1
        if self._nodes <= _EACH_NODE_UP_TO or not report.usable:
            text = Text.assemble(f"[{self._done}/{self._nodes}] {report.node}: ", _verdict(report.verdict))
            reason = _worst_finding(report)
            self._say(Text.assemble(text, f" {_label(reason)}: {reason.observed}") if reason else text)

    def phase(self, text: str) -> None:
        """One line, where there is something to wait for."""
        if self._nodes > 1:
            self._say(Text(text))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def print_report(console: Console, report: FleetReport, *, all_findings: bool = False) -> None:
    """Folded nodes with what is wrong with them and what to do; the last lines say which nodes are usable."""
    for fold in fold_reports(report.nodes.values(), all_findings=all_findings):
        _print_fold(console, fold)
    console.print()
    lost = [name for name, node in report.nodes.items() if not node.usable]
    if lost:
        console.print(Text.assemble(("not usable: ", "bold"), (fold_nodes(lost), "red")), soft_wrap=True)
    console.print(usable_line(report), soft_wrap=True)


def usable_line(report: FleetReport) -> Text:
    """`usable: node[1-3] (3 of 4 nodes, 2.1 s)`."""
    count = f" ({len(report.usable)} of {len(report.nodes)} nodes, {report.elapsed_s:.1f} s)"
    names = (fold_nodes(report.usable), "green") if report.usable else ("none", "red")
    return Text.assemble(("usable: ", "bold"), names, count)


def print_usable(report: FleetReport, *, one_per_line: bool) -> None:
    """The names of the usable nodes for a program: one NodeSet, or a name per line, and nothing else."""
    names = report.usable
    lines = names if one_per_line else (fold_nodes(names),) if names else ()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def print_changes(console: Console, before: FleetReport, after: FleetReport, at: str) -> None:
    """The nodes that a repeated check found to be different, folded, or that nothing is."""
    for fold in fold_reports(find_changed(before, after)):
        known = {before.nodes[name].verdict for name in fold.names if name in before.nodes}
        was = Text(", ").join(_verdict(verdict) for verdict in sorted(known)) if known else Text("new", style="dim")
        _print_fold(console, fold, Text(f"{at} ", "dim"), Text.assemble(was, " → "))
    quiet = "" if find_changed(before, after) else "no change; "
    console.print(Text.assemble((f"{at} ", "dim"), quiet, usable_line(after)), soft_wrap=True)


def _print_fold(console: Console, fold: NodeFold, at: Text | str = "", was: Text | str = "") -> None:
    console.print(Text.assemble(at, (fold.nodes, "bold"), ": ", was, _verdict(fold.verdict)), soft_wrap=True)
    for finding in fold.findings:
        _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    expected = f"; expected: {finding.expected}" if finding.expected else ""
    severity = Text(f"  {finding.severity.value:<{_LABEL_WIDTH}}", style=STYLES[finding.severity])
    rows = [(severity, Text.assemble((_label(finding), "bold"), f": {finding.observed}{expected}"))]
    if finding.remedy and not finding.severity.is_fine:
        rows.append((Text(f"  {'':<{_LABEL_WIDTH}}"), Text(f"→ {finding.remedy}", style="dim")))
    if not console.is_terminal:  # one line each, so that they can be searched
        for label, text in rows:
            console.print(Text.assemble(label, text), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_column(width=2 + _LABEL_WIDTH, no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _label(finding: Finding) -> str:
    return f"{finding.check} ({finding.device})" if finding.device else finding.check


def _verdict(verdict: Verdict) -> Text:
    return Text(verdict.value, style=STYLES[verdict])


def _worst_finding(report: NodeReport) -> Finding | None:
    """The first of the findings that made the verdict; None for a healthy node."""
    if report.verdict.is_fine:
        return None
    return next(finding for finding in report.findings if finding.severity is report.verdict)


def _urgency(item: tuple[str, _Row]) -> int:
    """Bad nodes first, then those at work, then those that wait, then the healthy ones."""
    row = item[1]
    if row.report is not None:
        return 3 if row.report.verdict.is_fine else 0
    return 2 if row.started_s is None else 1
