"""`burst env`: the NCCL and gloo environment of every node, with the reason for each choice.

Names and values come from nodes, so they are Text, never markup.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.nodes.check_nodes import STYLES
from burst_cli.options import JsonOption, NodeOptions
from burst_cli.render import grouped, listing
from cluster.checks.check import Finding, Verdict
from cluster.checks.nccl_log import check_nccl_log
from cluster.env.live import Difference, compare_live
from cluster.env.plan import Format, NodeEnvironment, render_environment
from cluster.errors import HostsError
from cluster.ssh.hosts import fold_nodes, parse_nodes
from engine.config.errors import ConfigError
from engine.runs.figures import count_of
from engine.runs.files import json_text

if TYPE_CHECKING:
    from cluster.env.ask import FleetEnvironment

LOG_BYTES = 64 << 20
app = new_verb()


@dataclass(frozen=True)
class EnvOptions(NodeOptions):
    """What both parts of the verb are told."""

    node: Annotated[
        str | None, typer.Option(metavar="NODES", help="Only these of the nodes, such as node3 or node[1-2].")
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A run folder: NCCL's log and the flight recorder go to its logs/ on every node."
        ),
    ] = None

    def ask(self, *, with_live: bool = False) -> tuple[FleetEnvironment, str]:
        """(environments of the nodes that are meant, where their names came from); of this machine when none is named.

        All nodes are asked even if --node picks a few, because rails are compared across nodes.
        """
        from cluster.env.ask import ask_fleet  # loads SSH, which `--help` need not

        targets = self.select(or_here=True)
        if targets.hosts:
            _chosen(self.node, [host.name for host in targets.hosts])
        log_dir = str(self.run.absolute() / "logs") if self.run is not None else None
        with render.stderr().status("asking what is there"):
            fleet = ask_fleet(targets.hosts, targets.config.cluster, with_live=with_live, log_dir=log_dir)
        chosen = _chosen(self.node, [*fleet.environments, *fleet.errors])

        def keep(table: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one for name, one in table.items() if name in chosen}

        kept = replace(fleet, environments=keep(fleet.environments), live=keep(fleet.live), errors=keep(fleet.errors))
        return kept, targets.source


@app.command()
def show(
    nodes: EnvOptions,
    form: Annotated[
        Format | None, typer.Option("--format", help="Print the environment of one node as text, without a table.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show the variables of each node, the adapters that NCCL uses, and why.

    Nodes come from --hosts, --hostfile, cluster=NAME or Slurm; without any,
    this machine is looked at. Each node is asked once, over SSH; nothing is
    installed or changed there. Nodes that get the same are shown once.

    \b
    burst env show cluster=lab
        every node, with reasons
    burst env show cluster=lab --node node3 --format sh
        lines to source in a shell

    Exit codes: 0 every node has a plan, 1 some have none, 2 usage or
    configuration.
    """
    if as_json and form is not None:
        raise ConfigError(f"--json and --format {form.value} exclude each other: one document, or lines of text")
    fleet, source = nodes.ask()
    found = fleet.environments
    if form is None:
        plans = {name: environment.to_dict() for name, environment in found.items()}
        document = {"nodes": plans, "errors": fleet.errors, "source": source}
        render.show(document, fleet_view(fleet, source), as_json=as_json)
    elif len(found) > 1:
        count = f"there are {len(found)} ({fold_nodes(found)})"
        raise ConfigError(f"--format {form}: the environment of one node, but {count}; name one with --node")
    else:
        sys.stdout.write("".join(render_environment(environment, form) for environment in found.values()))
    _report_errors(fleet)
    return 1 if fleet.errors else 0


@app.command()
def check(
    nodes: EnvOptions,
    nccl_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare NCCL's own log (NCCL_DEBUG=INFO) with the plan instead."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare the plan with what is set on the nodes, or with NCCL's log.

    Looked at are a login, nccl.conf and running ranks. Named are variables that
    differ, and NCCL_ and GLOO_ variables that the plan does not know;
    nothing else of an environment leaves a node.
    With --nccl-log: which adapters and which network NCCL says it took.

    Exit codes: 0 as planned, 1 differences, 2 usage or configuration,
    3 something could not be looked at.
    """
    log = _read_log(nccl_log) if nccl_log is not None else None
    fleet, source = nodes.ask(with_live=log is None)
    report = check_report(fleet, log)
    render.show(report.to_dict() | {"source": source}, report_view(report), as_json=as_json)
    if not as_json:
        _report_errors(fleet)
    return report.exit_code


def _chosen(node: str | None, names: Sequence[str]) -> set[str]:
    """The names that --node picks; all without it. Raises HostsError for one that is none of them."""
    wanted = set(names) if node is None else set(parse_nodes(node, "--node").names)
    if not wanted <= set(names):
        unknown = fold_nodes(sorted(wanted - set(names)))
        raise HostsError(f"--node {node}: {unknown} is none of the nodes; they are {fold_nodes(names)}")
    return wanted


def _read_log(path: Path) -> str:
    """The text of a log of NCCL; its beginning, should it be huge, for NCCL says at the start what it uses."""
    if not path.is_file():
        raise ConfigError(f"--nccl-log {path}: no such file; NCCL writes one where NCCL_DEBUG_FILE says")
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode("utf-8", errors="replace")


def _report_errors(fleet: FleetEnvironment) -> None:
    """Which nodes have no plan, and why."""
    render.say(render.stderr(), *(render.told("error", error) for error in fleet.errors.values()))


@dataclass(frozen=True)
class CheckReport:
    """What `burst env check` found, by node: differences to what is set, or findings about NCCL's log.

    ranks: how many running ranks were looked at.
    """

    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0

    @property
    def exit_code(self) -> int:
        """1 for a difference, else 3 for what could not be seen, else 0."""
        verdicts = {finding.severity for finding in self.findings or ()}
        if any(self.differences.values()) or verdicts & {Verdict.FAIL, Verdict.WARN}:
            return 1
        return 3 if self.errors or Verdict.UNKNOWN in verdicts else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        nodes = {node: {"differences": [one.to_dict() for one in all_]} for node, all_ in self.differences.items()}
        log = {} if self.findings is None else {"nccl_log": [asdict(finding) for finding in self.findings]}
        return {"nodes": nodes, "errors": dict(self.errors), "exit_code": self.exit_code, **log}


def check_report(fleet: FleetEnvironment, log: str | None) -> CheckReport:
    """The plan against what is set on the nodes, or against `log` if there is one."""
    if log is not None:
        return CheckReport(findings=tuple(check_nccl_log(log, fleet.environments)), errors=fleet.errors)
    differences = {node: compare_live(one, fleet.live.get(node, ())) for node, one in fleet.environments.items()}
    ranks = sum(source.is_process for sources in fleet.live.values() for source in sources)
    return CheckReport(differences=differences, errors=fleet.errors, ranks=ranks)


def report_view(report: CheckReport) -> RenderableType:
    """Findings, or differences, as a table; a line when all is as planned."""
    if report.findings is not None:
        findings = (
            (one.node, Text(one.severity.value, STYLES[one.severity]), one.observed, one.expected, one.remedy)
            for one in report.findings
        )
        return listing(("node", "", "observed", "expected", "what to do"), findings, ruled=True)
    if not report.differences:
        return Text("no node could be looked at")
    folded = grouped((one, node) for node, differences in report.differences.items() for one in differences)
    if not folded:
        looked = f"(looked at: login, nccl.conf, {count_of('running rank', report.ranks)})"
        return Text(f"{fold_nodes(report.differences)}: nothing differs from the plan {looked}")
    rows = (
        (fold_nodes(nodes), one.place, one.name, Text(one.kind, "yellow"), _value(one.live), _value(one.planned))
        for one, nodes in folded.items()
    )
    table = listing(("nodes", "where", "variable", "", "set", "planned"), rows, ruled=True)
    where = {node for nodes in folded.values() for node in nodes}
    return Group(table, Text(f"{count_of('difference', len(folded))} on {count_of('node', len(where))}"))


def _value(text: str | None) -> str:
    return "-" if text is None else text


def fleet_view(fleet: FleetEnvironment, source: str) -> RenderableType:
    """Every class of equal nodes once: variables, adapters, rails, warnings."""
    parts: list[RenderableType] = []
    for nodes, environment in fold_environments(fleet.environments):
        count = f"  ({len(nodes)} nodes)" if len(nodes) > 1 else ""
        parts += [Text.assemble((fold_nodes(nodes), "bold"), (count, "dim")), _variables_table(environment)]
        parts += [Text(), _hcas_table(environment)] if environment.hcas else []
        parts += [*(render.told("warning", text) for text in environment.warnings), Text()]
    parts.append(Text(f"{count_of('node', len(fleet.environments))} from {source}", style="dim"))
    return Group(*parts)


def fold_environments(environments: Mapping[str, NodeEnvironment]) -> list[tuple[list[str], NodeEnvironment]]:
    """(names, environment) of every class of nodes that get the very same, in the order of their first node."""
    plain = {node: replace(environment, node="") for node, environment in environments.items()}
    classes = grouped((json_text(one.to_dict()), node) for node, one in plain.items())
    return [(nodes, plain[nodes[0]]) for nodes in classes.values()]


def _variables_table(environment: NodeEnvironment) -> Table:
    rows = [(Text(one.name, "cyan"), one.value, one.reason) for one in environment.variables]
    absent = [tuple(Text(text, "dim") for text in (one.name, "not set", one.reason)) for one in environment.left_out]
    return listing(("variable", "value", "why"), [*rows, *absent], ruled=True)


def _hcas_table(environment: NodeEnvironment) -> Table:
    """Every port with the GPUs that it serves, and how these found it: `GPU 0, 1 by the same NUMA node`."""
    rows = []
    for decision in environment.hcas:
        served = [rail for rail in environment.rails if rail.port.name == decision.port.name]
        by_reason = grouped((rail.found_by, str(rail.gpu)) for rail in served)
        why = [decision.reason, *(f"GPU {', '.join(gpus)} by {reason}" for reason, gpus in by_reason.items())]
        word = Text("kept", "green") if decision.kept else Text("dropped", "yellow")
        gpus = ", ".join(str(rail.gpu) for rail in served) or "-"
        rows.append((decision.port.name, decision.port.netdev or "-", gpus, word, "; ".join(why)))
    return listing(("port", "interface", "GPU", "", "why"), rows, ruled=True)
