"""A check of nodes as people see it: who is waited for, then folded results. Text of nodes is never markup."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.fold import fold_reports
from cluster.checks.run import CheckObserver
from cluster.ssh.nodes import fold_nodes

STYLES = {
    Verdict.OK: "green",
    Verdict.SKIP: "dim",
    Verdict.WARN: "yellow",
    Verdict.UNKNOWN: "magenta",
    Verdict.FAIL: "bold red",
}
_EACH_NODE_UP_TO = 32  # beyond that bad nodes alone get lines
_LABEL_WIDTH = 8


@contextlib.contextmanager
def open_check_view(console: Console, nodes: Iterable[str]) -> Iterator[CheckObserver]:
    """What shows the check while it runs."""
    with console.status("") as status:
        yield CheckView(console, nodes, status.update)


class CheckView(CheckObserver):
    """On a terminal one line that says who is waited for, elsewhere one per node as it is done; of a large fleet only
    the bad ones."""

    def __init__(self, console: Console, nodes: Iterable[str], show: Callable[[Text], None]) -> None:
        self._console, self._show = console, show
        self._waited_for, self._usable = dict.fromkeys(nodes), 0
        self._count = len(self._waited_for)
        self.phase("")

    def finished(self, report: NodeReport) -> None:
        """Counts it; a line, where it matters."""
        del self._waited_for[report.node]
        self._usable += report.usable
        self.phase("")
        if not self._console.is_terminal and (self._count <= _EACH_NODE_UP_TO or not report.usable):
            place = f"[{self._count - len(self._waited_for)}/{self._count}]"
            text = Text.assemble(f"{place} {report.node}: ", _verdict(report.verdict))
            if not report.verdict.is_fine:
                worst = next(one for one in report.findings if one.severity is report.verdict)
                text = Text.assemble(text, f" {_label(worst)}: {worst.observed}")
            self._console.print(text, soft_wrap=True)

    def phase(self, text: str) -> None:
        """What is being done now, behind how many nodes are done."""
        done = self._count - len(self._waited_for)
        if not text and 0 < len(self._waited_for) <= _EACH_NODE_UP_TO:
            text = f"waiting for {fold_nodes(self._waited_for)}"
        told = f"{done} of {self._count} nodes checked, {self._usable} usable"
        self._show(Text("; ".join(filter(None, (told, text)))))


def print_report(console: Console, report: FleetReport, *, all_findings: bool = False) -> None:
    """Folded nodes with what is wrong with them and what to do; the last lines say which nodes are usable."""
    for fold in fold_reports(report.nodes.values(), all_findings=all_findings):
        console.print(Text.assemble((fold.nodes, "bold"), ": ", _verdict(fold.verdict)), soft_wrap=True)
        for finding in fold.findings:
            _print_finding(console, finding)
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


def print_usable(report: FleetReport) -> None:
    """The names of the usable nodes for a program: one NodeSet, and nothing else."""
    sys.stdout.write(f"{fold_nodes(report.usable)}\n" if report.usable else "")


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
