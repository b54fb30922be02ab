"""Processes of a node that should not be there: leftovers of runs."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.checks.finding import Finding
from cluster.checks.report import Part, Report, age
from cluster.parse.host import Process, RunProcesses, parse_runs
from cluster.probe.section import NodeProbe
from cluster.remote_text import one_line
from engine.config_cluster import ClusterConfig

_NAMED = 5


def judge_runs(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.runs: one finding per run that has processes here, or one that says that there is none."""
    found = parse_runs(probe)
    report = Report(probe.node, "host.runs", "no run is under way")
    if not found.processes:
        return [report.ok(f"none{_unread(found)}")]
    runs = sorted({process.run_id for process in found.processes})
    return [_judge_run(report, run, [one for one in found.processes if one.run_id == run]) for run in runs]


def _judge_run(report: Report, run: str, processes: Sequence[Process]) -> Finding:
    owners = ", ".join(sorted({process.owner for process in processes}))
    many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    oldest = sorted(processes, key=lambda one: -one.age_s)
    remedy = "if nobody waits for it, kill these processes"
    return report.on(one_line(run, 100)).warn(f"{many} of {owners}: {_names(oldest)}", remedy)


def _unread(found: RunProcesses) -> str:
    if found.unread == 0:
        return ""
    return f" among those of this user ({found.unread} of others: only root may look into them)"


def _names(processes: Sequence[Process]) -> str:
    shown = [f"{one.pid} {one_line(one.name, 40) or '(no name)'} ({age(one.age_s)})" for one in processes[:_NAMED]]
    rest = len(processes) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


PARTS = (Part("host.runs", ("host.runs",), judge_runs),)
