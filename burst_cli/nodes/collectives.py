"""`burst check-nodes --collectives`: a launch that measures in place of training, and what it found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.launch.show import show_plan
from burst_cli.options import Targets
from burst_cli.render import listing
from burst_cli.runs.failure import failure_block
from cluster.control.attempt import StopRequests
from cluster.control.controller import control
from cluster.control.link import LaunchObserver
from cluster.control.runner import SurveyOptions, open_links, runner_for
from cluster.plan import LaunchPlan
from cluster.ssh.hosts import fold_nodes
from engine.config.settings import RunConfig
from engine.runs.figures import binary_bytes, seconds
from engine.runs.folder import create_run, default_runs_dir, new_run_path

MODULE, EXP = "engine.bench.collectives", "collectives"
SLOW_SHARE = 0.5  # of the usual rate: below, a node or a link holds the others up


def check_collectives(targets: Targets, overrides: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """The exit code of the measurement on `targets`, 1 where it failed or something is slow.

    overrides: what was typed. Raises UnfitNodesError for nodes that cannot carry a launch.
    """
    nodes = tuple(host.name for host in targets.hosts)
    cluster = replace(targets.config.cluster, launcher="auto", nodes=fold_nodes(nodes) if nodes else None)
    asked = SurveyOptions(nodes or None, tuple(overrides), dry_run=dry_run, busy=render.stderr().status, module=MODULE)
    survey = runner_for(cluster).survey(RunConfig(exp=EXP, cluster=cluster), asked)
    plan = survey.plan(survey.config, new_run_path(default_runs_dir(), EXP))
    if dry_run:
        show_plan(plan, None, survey.warnings, as_json=as_json)
        return 0
    survey.prepare(plan)
    return _run(plan, as_json=as_json)


def _run(plan: LaunchPlan, *, as_json: bool) -> int:
    stop, console = StopRequests(), render.stderr()
    with stop.listening(), console.status(f"{plan.world_size} ranks on {len(plan.nodes)} nodes, {plan.backend.name}"):
        run = create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
        outcome = control(plan, run, open_links(plan, run), LaunchObserver(), stop)
    if outcome.failure is not None:
        render.say(console, failure_block(run, outcome.failure))
    if outcome.status != "completed":
        return outcome.exit_code
    found = judged(run.read_summary() or {}, [node.name for node in plan.nodes])
    document = {"run": str(run.path), "backend": plan.backend.name, "ranks": plan.world_size, **found}
    render.show(document, collectives_view(found), as_json=as_json)
    return 1 if found["slow_nodes"] or found["slow_pairs"] else 0


def judged(summary: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """What the ranks found with names of nodes, the usual rate of a pair, and which nodes and other pairs are below.

    A node's rate is the upper median over its pairs, the usual one that over nodes: one bad node of four has half of
    all pairs. Of two nodes none can be called the slow one.
    """
    pairs = [{**pair, "nodes": [nodes[at] for at in pair["nodes"]]} for pair in summary["pairs"]]
    by_node = {node: [pair["gbps"] for pair in pairs if node in pair["nodes"]] for node in nodes}
    rates = {node: statistics.median_high(known) for node, known in by_node.items() if known}
    usual = statistics.median_high(rates.values()) if rates else None
    limit = SLOW_SHARE * (usual or 0)
    slow = [node for node, rate in rates.items() if rate < limit]
    slow_pairs = [pair for pair in pairs if pair["gbps"] < limit and not set(pair["nodes"]) & set(slow)]
    verdict = {"usual_gbps": usual, "node_gbps": rates, "slow_nodes": slow, "slow_pairs": slow_pairs}
    return {"collectives": summary["collectives"], "pairs": pairs, **verdict}


def collectives_view(found: Mapping[str, Any]) -> RenderableType:
    """A row per operation and size, the usual rate between two nodes, and who is slow."""
    headings = ("operation", "size", "time", "busbw Gbit/s")
    rows = (
        (row["operation"], binary_bytes(row["bytes"]), seconds(row["seconds"]), f"{row['busbw_gbps']:.3g}")
        for row in found["collectives"]
    )
    table = listing(headings, rows, headings[1:])
    usual = found["usual_gbps"]
    if usual is None:
        return table
    slow = [
        *(f"{node} is slow with most others: {found['node_gbps'][node]:.3g} Gbit/s" for node in found["slow_nodes"]),
        *(f"{' and '.join(pair['nodes'])}: {pair['gbps']:.3g} Gbit/s" for pair in found["slow_pairs"]),
    ]
    remedy = ["compare cable, switch port, negotiated speed and MTU with those of the others"] if slow else []
    lines = [f"between two nodes, both ways at once: {usual:.3g} Gbit/s is usual", *slow, *remedy]
    return Group(table, *(Text(line, style="bold red" if line in slow else "") for line in lines))
