"""From the words after `burst sweep` to its plan and its lanes, and to the table at its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from burst_cli import render
from burst_cli.app import EXIT_INTERRUPTED
from burst_cli.compose import compose, sweep_axes
from burst_cli.plan.memory_check import MemoryPlanner
from burst_cli.sweep.estimate import LaunchJudge
from burst_cli.sweep.grammar import Axis, cells_of, check_axes
from burst_cli.sweep.plan import SweepPlan, build_sweep, check_legal
from burst_cli.sweep.runner import Lane, SweepManner, SweepRunner
from burst_cli.sweep.store import SweepFolder, open_sweep, sweeps_dir
from burst_cli.sweep.view import expectation, open_sweep_view, plan_view, tally
from cluster.control.attempt import StopRequests
from cluster.facts import probe_local_node
from cluster.launch.runner import runner_for
from cluster.ssh.nodes import parse_nodes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig


@dataclass(frozen=True)
class SweepRequest:
    """What was typed. force: also cells that are expected not to fit. name: begins the id of the sweep."""

    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    runs_dir: Path
    parallel: int = 1
    force: bool = False
    skip_illegal: bool = False
    name: str | None = None
    max_failures: int | None = None
    retry: frozenset[str] = frozenset()


def sweep_request(request: SweepRequest, *, dry_run: bool, as_json: bool) -> int:
    """The exit code of the sweep that `request` means, or 0 once a rehearsal has shown it."""
    console = render.stderr()
    with console.status("composing and checking the cells"):
        plan, lanes = plan_sweep(request)
    if dry_run:
        if as_json:
            render.emit_json(plan.to_dict())
        else:
            render.stdout().print(plan_view(plan, request.parallel))
        return 0
    console.print(expectation(plan, request.parallel), soft_wrap=True)
    folder, was_there = open_sweep(request.runs_dir, plan)
    how = "goes on in" if was_there else "is recorded in"
    console.print(f"sweep {folder.sweep_id} {how} {folder.path}", style="dim", markup=False, soft_wrap=True)
    folders = [word for one in request.config_dirs for word in ("--config-dir", str(one.absolute()))]
    arguments = (*folders, *(("--force",) if request.force else ()))
    manner = SweepManner(request.runs_dir, lanes, arguments, request.max_failures, request.retry)
    stop = StopRequests()
    with stop.listening(), open_sweep_view(console) as view:
        cells = SweepRunner(folder, manner, view, stop).run()
    _show_end(cells, folder, request.runs_dir, as_json=as_json)
    failed = any(cell["state"] in ("failed", "pending", "running") for cell in cells)
    return EXIT_INTERRUPTED if stop.count else int(failed)


def _show_end(cells: list[dict[str, Any]], folder: SweepFolder, runs_dir: Path, *, as_json: bool) -> None:
    if as_json:
        render.emit_json({"sweep_id": folder.sweep_id, "path": str(folder.path), "cells": cells})
        return
    from burst_cli.report.build import build_report
    from burst_cli.report.write import report_view

    console = render.stdout()
    console.print(report_view(build_report(runs_dir, sweep=folder.sweep_id), console.width))
    more = f"{tally(cells)}\nmore: burst report --sweep {folder.sweep_id} --output report.html"
    console.print(Text(more), soft_wrap=True)


def plan_sweep(request: SweepRequest) -> tuple[SweepPlan, tuple[Lane, ...]]:
    """The checked plan and where its cells run. Raises ConfigError that names every mistake; nothing was created."""
    if request.name is not None and not re.fullmatch(r"\w[\w.-]*", request.name, re.ASCII):
        raise ConfigError(f"--name {request.name!r}: expected letters, digits, dots and dashes; it names a folder")
    axes = sweep_axes(request.overrides, request.config_dirs)
    check_axes(axes)
    facts = probe_local_node()
    lanes = _lanes(request, axes, facts.gpus)
    on_first_lane = lanes[0].overrides  # all lanes have as many nodes

    def compose_cell(words: Sequence[str]) -> RunConfig:
        return compose([*words, *on_first_lane], request.config_dirs).config

    judge = LaunchJudge(facts, MemoryPlanner(), request.force)
    plan = build_sweep(
        request.overrides, axes, compose_cell, judge, name=request.name, recorded=lambda name: _recorded(request, name)
    )
    check_legal(plan, skip_illegal=request.skip_illegal)
    return plan, lanes


def _recorded(request: SweepRequest, sweep_id: str) -> dict[str, str | None]:
    """What an earlier command of the same sweep found out; with --force nothing is held against a cell."""
    folder = SweepFolder(sweeps_dir(request.runs_dir) / sweep_id)
    if request.force or not (folder.path / "sweep.json").exists():
        return {}
    return {str(cell["id"]): cell.get("short_of_memory") for cell in folder.read()["cells"]}


def _lanes(request: SweepRequest, axes: list[Axis], gpus: int) -> tuple[Lane, ...]:
    """From the configuration of the first cell that composes; the nodes of a sweep are the same in all cells."""
    if request.parallel == 1:
        return (Lane("one"),)
    swept = [axis.key for axis in axes if axis.is_sweep and axis.key.startswith("cluster")]
    if swept:
        raise ConfigError(f"--parallel {request.parallel}: {swept[0]} differs between cells; leave --parallel out")
    config = _first_legal(request, axes)
    if config is None:
        return (Lane("one"),)  # no cell composes, which is about to be said
    nodes, runner = config.cluster.nodes, runner_for(config.cluster)
    names = parse_nodes(nodes, "cluster.nodes").names if nodes is not None and not runner.is_here else ()
    return choose_lanes(names, request.parallel, gpus=gpus, is_queued=runner.is_queued)


def _first_legal(request: SweepRequest, axes: list[Axis]) -> RunConfig | None:
    for words, _ in cells_of(axes):
        try:
            return compose(words, request.config_dirs).config
        except ConfigError:
            continue
    return None


def choose_lanes(names: Sequence[str], parallel: int, *, gpus: int = 0, is_queued: bool = False) -> tuple[Lane, ...]:
    """Where cells run at the same time: on disjoint sets of neighbours of the nodes `names`, of equal size.

    Without names on this machine, or as jobs of a scheduler. Raises ConfigError where that cannot be.
    """
    if names:
        if parallel < 1 or len(names) % parallel:
            legal = ", ".join(str(number) for number in range(1, len(names) + 1) if len(names) % number == 0)
            raise ConfigError(
                f"--parallel {parallel}: {len(names)} nodes cannot be divided into equal parts; legal values: {legal}"
            )
        size = len(names) // parallel
        parts = (",".join(names[first : first + size]) for first in range(0, len(names), size))
        return tuple(Lane(part, (f"cluster.nodes='{part}'",)) for part in parts)
    if parallel > 1 and gpus and not is_queued:
        raise ConfigError(
            f"--parallel {parallel}: cells at the same time would share the {gpus} GPUs of this machine; "
            "name nodes with cluster.nodes, or leave it out"
        )
    where = "the queue" if is_queued else "this machine"
    return tuple(Lane(where if parallel == 1 else f"{where} {number}") for number in range(1, parallel + 1))
