"""`burst check-nodes`: what is wrong on which node, before a launch finds out. Text of nodes is never markup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption, NodeOptions
from cluster.checks import run
from cluster.checks.check import Finding, FleetReport, NodeReport, Verdict, fold_reports
from cluster.checks.run import CheckObserver, CheckOptions
from cluster.checks.selection import GROUPS, read_selection
from cluster.checks.selection import explain as explain_checks
from cluster.ssh.hosts import Host, fold_nodes
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError

STYLES = {
    Verdict.OK: "green",
    Verdict.SKIP: "dim",
    Verdict.WARN: "yellow",
    Verdict.UNKNOWN: "magenta",
    Verdict.FAIL: "bold red",
}
_EACH_NODE_UP_TO = 32  # beyond that bad nodes alone get lines
_LABEL_WIDTH = 8
app = new_verb()


@app.command()
def check_nodes(
    nodes: NodeOptions,
    local: Annotated[
        bool, typer.Option(help="This machine, whatever is named: for init containers and prologs of schedulers.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECKS", help="Only these groups or checks: gpu,ib or gpu.busy.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECKS", help="Not these groups or checks.")] = None,
    names_only: Annotated[
        bool, typer.Option("--list", "-l", help="Print only the usable nodes: one line such as node[1-3].")
    ] = False,
    collectives: Annotated[
        bool, typer.Option(help="Measure all-reduce, all-to-all and pairs of nodes by a launch instead.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="With --collectives: print the launch.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one node may take to answer.")] = 60,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Show what is OK or was skipped, too.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="CHECK", help="Say what a check means, and check nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check every node: SSH, GPUs, InfiniBand, network, disks and software.

    All nodes are asked at once, over SSH; nothing is installed or changed on them. Nodes come from --hosts, --hostfile,
    cluster.nodes (cluster=NAME) or Slurm; without any, this machine is checked. What should be there comes from
    cluster.expected, else from what most nodes have.

    FAIL: start no run there. UNKNOWN: could not be seen, which does not count as healthy. WARN: usable, worth a look.

    Exit code 0: all nodes are usable. 1: a node failed. 3: none failed, but one is unknown. 2: wrong usage.

        burst check-nodes cluster=testbed
        burst check-nodes --hosts node[1-8] --skip ib -l
        burst check-nodes cluster=lab --collectives

    --collectives starts ranks as `burst launch` does (NCCL where GPUs are, else gloo) and trains nothing. It prints
    busbw, as nccl-tests count it, per size, and names a node or a pair below half of the usual rate: exit code 1.
    """
    if explain is not None:
        found = explain_checks(explain)
        lines = (Text.assemble((name, "bold"), f": {text}") for name, text in found.items())
        render.show({"checks": found}, *lines, as_json=as_json)
        return 0
    if dry_run and not collectives:
        raise ConfigError("--dry-run shows the launch of --collectives; checks change nothing on nodes")
    if local and (nodes.hosts is not None or nodes.hostfile is not None):
        raise ConfigError("--local checks this machine, so it takes no --hosts or --hostfile")
    if collectives and (only or skip or names_only or show_all):
        raise ConfigError("--collectives makes no checks, so it takes no --only, --skip, --list or --all")
    if as_json and names_only:
        raise ConfigError("--json and --list are two ways to print the result; give one of them")
    options = CheckOptions(GROUPS, read_selection(only or (), skip or ()), timeout_s=timeout)
    targets = nodes.select(or_here=True, local=local)
    if collectives:
        from burst_cli.nodes.collectives import check_collectives  # loads a launch

        return check_collectives(targets, nodes.overrides or (), dry_run=dry_run, as_json=as_json)
    report = run_check(targets.hosts, targets.config.cluster, options)
    if as_json:
        render.emit_json(report.to_dict())
    elif names_only:  # for a program: one NodeSet, and nothing else
        render.say(render.stdout(), *filter(None, [fold_nodes(report.usable)]))
    else:
        print_report(render.stdout(), report, all_findings=show_all)
    return report.exit_code


def run_check(hosts: Sequence[Host], cluster: ClusterConfig, options: CheckOptions) -> FleetReport:
    """What `hosts` are like (none: this machine); on stderr how far it is, and what is wrong here, not on a node."""
    console = render.stderr()
    if not hosts:
        report = run.check_this_machine(cluster, options)
    else:
        with console.status("") as status:
            view = CheckView(console, (host.name for host in hosts), status.update)
            report = run.check_nodes(hosts, cluster, options, view)
    render.say(console, *(render.told("warning", note) for note in report.notes))
    return report


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
                text.append(f" {_label(worst)}: {worst.observed}")
            render.say(self._console, text)

    def phase(self, text: str) -> None:
        """What is being done now, behind how many nodes are done."""
        done = self._count - len(self._waited_for)
        if not text and 0 < len(self._waited_for) <= _EACH_NODE_UP_TO:
            text = f"waiting for {fold_nodes(self._waited_for)}"
        told = f"{done} of {self._count} nodes checked, {self._usable} usable"
        self._show(Text("; ".join(filter(None, (told, text)))))


def print_report(console: Console, report: FleetReport, *, all_findings: bool = False) -> None:
    """Folded nodes with what is wrong with them and what to do; the last lines say which nodes are usable:
    `usable: node[1-3] (3 of 4 nodes, 2.1 s)`."""
    for fold in fold_reports(report.nodes.values(), all_findings=all_findings):
        render.say(console, Text.assemble((fold.nodes, "bold"), ": ", _verdict(fold.verdict)))
        for finding in fold.findings:
            _print_finding(console, finding)
    lost = [name for name, node in report.nodes.items() if not node.usable]
    lines = [Text(), *([Text.assemble(("not usable: ", "bold"), (fold_nodes(lost), "red"))] if lost else [])]
    names = (fold_nodes(report.usable), "green") if report.usable else ("none", "red")
    count = f" ({len(report.usable)} of {len(report.nodes)} nodes, {report.elapsed_s:.1f} s)"
    render.say(console, *lines, Text.assemble(("usable: ", "bold"), names, count))


def _print_finding(console: Console, finding: Finding) -> None:
    expected = f"; expected: {finding.expected}" if finding.expected else ""
    severity = Text(f"  {finding.severity.value:<{_LABEL_WIDTH}}", style=STYLES[finding.severity])
    rows = [(severity, Text.assemble((_label(finding), "bold"), f": {finding.observed}{expected}"))]
    if finding.remedy and not finding.severity.is_fine:
        rows.append((Text(" " * (2 + _LABEL_WIDTH)), Text(f"→ {finding.remedy}", style="dim")))
    if not console.is_terminal:  # one line each, so that they can be searched
        render.say(console, *(Text.assemble(label, text) for label, text in rows))
        return
    grid = Table.grid()
    grid.add_column(width=2 + _LABEL_WIDTH)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _label(finding: Finding) -> str:
    return f"{finding.check} ({finding.device})" if finding.device else finding.check


def _verdict(verdict: Verdict) -> Text:
    return Text(verdict.value, style=STYLES[verdict])
