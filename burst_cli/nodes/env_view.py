"""Environments of nodes for people and programs. Names and values come from nodes, so they are Text, never markup."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.figures import count_of, grouped
from burst_cli.nodes.check_view import STYLES
from burst_cli.tables import listing
from cluster.checks.finding import Finding, Verdict
from cluster.env.facts import NodeEnvironment, Rail
from cluster.env.live import Difference, compare_live
from cluster.env.nccl_log import check_nccl_log
from cluster.env.plan import Format, render_environment
from cluster.ssh.nodes import fold_nodes
from engine.config.errors import ConfigError
from engine.runs.records import json_text

if TYPE_CHECKING:
    from cluster.env.ask import FleetEnvironment


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
        nodes = {
            node: {"differences": [one.to_dict() for one in differences]}
            for node, differences in self.differences.items()
        }
        document: dict[str, Any] = {"nodes": nodes, "errors": dict(self.errors), "exit_code": self.exit_code}
        if self.findings is not None:
            document["nccl_log"] = [asdict(finding) for finding in self.findings]
        return document


def check_report(fleet: FleetEnvironment, log: str | None) -> CheckReport:
    """The plan against what is set on the nodes, or against `log` if there is one."""
    if log is not None:
        return CheckReport(findings=tuple(check_nccl_log(log, fleet.environments)), errors=fleet.errors)
    differences = {
        node: compare_live(environment, fleet.live.get(node, ())) for node, environment in fleet.environments.items()
    }
    ranks = sum(source.is_process for sources in fleet.live.values() for source in sources)
    return CheckReport(differences=differences, errors=fleet.errors, ranks=ranks)


def fleet_view(fleet: FleetEnvironment, source: str) -> RenderableType:
    """Every class of equal nodes once: variables, adapters, rails, warnings."""
    parts: list[RenderableType] = []
    for nodes, environment in fold_environments(fleet.environments):
        parts += [*_class_view(nodes, environment), Text()]
    parts.append(Text(f"{count_of('node', len(fleet.environments))} from {source}", style="dim"))
    return Group(*parts)


def fold_environments(environments: Mapping[str, NodeEnvironment]) -> list[tuple[list[str], NodeEnvironment]]:
    """(names, environment) of every class of nodes that get the very same, in the order of their first node."""
    plain = {node: replace(environment, node="") for node, environment in environments.items()}
    classes = grouped((json_text(one.to_dict()), node) for node, one in plain.items())
    return [(nodes, plain[nodes[0]]) for nodes in classes.values()]


def print_text(fleet: FleetEnvironment, form: Format) -> None:
    """Write the environment of the one node that is meant to stdout. Raises ConfigError when there are several."""
    if len(fleet.environments) > 1:
        names = fold_nodes(fleet.environments)
        raise ConfigError(
            f"--format {form}: the environment of one node, but there are {len(fleet.environments)} ({names}); "
            "name one with --node"
        )
    for environment in fleet.environments.values():
        sys.stdout.write(render_environment(environment, form))


def report_view(report: CheckReport) -> RenderableType:
    """Findings, or differences, as a table; a line when all is as planned."""
    if report.findings is not None:
        rows = [
            (one.node, Text(one.severity.value, STYLES[one.severity]), one.observed, one.expected, one.remedy)
            for one in report.findings
        ]
        return listing(("node", "", "observed", "expected", "what to do"), rows, ruled=True)
    folded = grouped((one, node) for node, differences in report.differences.items() for one in differences)
    if not folded:
        return Text(_as_planned(report))
    table = listing(
        ("nodes", "where", "variable", "", "set", "planned"),
        (
            (fold_nodes(nodes), one.place, one.name, Text(one.kind, "yellow"), _value(one.live), _value(one.planned))
            for one, nodes in folded.items()
        ),
        ruled=True,
    )
    where = {node for nodes in folded.values() for node in nodes}
    return Group(table, Text(f"{count_of('difference', len(folded))} on {count_of('node', len(where))}"))


def _value(text: str | None) -> str:
    return "-" if text is None else text


def _as_planned(report: CheckReport) -> str:
    if not report.differences:
        return "no node could be looked at"
    looked = f"(looked at: login, nccl.conf, {count_of('running rank', report.ranks)})"
    return f"{fold_nodes(report.differences)}: nothing differs from the plan {looked}"


def print_errors(fleet: FleetEnvironment) -> None:
    """Say on stderr which nodes have no plan, and why."""
    console = render.stderr()
    for error in fleet.errors.values():
        console.print(render.told("error", error), soft_wrap=True)


def _class_view(nodes: Sequence[str], environment: NodeEnvironment) -> list[RenderableType]:
    title = Text(fold_nodes(nodes), style="bold")
    if len(nodes) > 1:
        title.append(f"  ({len(nodes)} nodes)", style="dim")
    parts: list[RenderableType] = [title, _variables_table(environment)]
    if environment.hcas:
        parts += [Text(), _hcas_table(environment)]
    return [*parts, *(render.told("warning", text) for text in environment.warnings)]


def _variables_table(environment: NodeEnvironment) -> Table:
    rows = [(Text(one.name, "cyan"), one.value, one.reason) for one in environment.variables]
    absent = [tuple(Text(text, "dim") for text in (one.name, "not set", one.reason)) for one in environment.left_out]
    return listing(("variable", "value", "why"), [*rows, *absent], ruled=True)


def _hcas_table(environment: NodeEnvironment) -> Table:
    rows = []
    for decision in environment.hcas:
        served = [rail for rail in environment.rails if rail.port.name == decision.port.name]
        gpus, why = ", ".join(str(rail.gpu) for rail in served), "; ".join([decision.reason, *_rail_texts(served)])
        word = Text("kept", "green") if decision.kept else Text("dropped", "yellow")
        rows.append((decision.port.name, decision.port.netdev or "-", gpus or "-", word, why))
    return listing(("port", "interface", "GPU", "", "why"), rows, ruled=True)


def _rail_texts(rails: Sequence[Rail]) -> list[str]:
    """How GPUs found their way to one port: `GPU 0, 1 by the same NUMA node`."""
    by_reason = grouped((rail.found_by, str(rail.gpu)) for rail in rails)
    return [f"GPU {', '.join(gpus)} by {reason}" for reason, gpus in by_reason.items()]
