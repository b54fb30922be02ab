"""From the words after `burst sweep` to its plan and its lanes, and to the table at its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from burst_cli import render
from burst_cli.app import EXIT_INTERRUPTED
from burst_cli.compose import compose, sweep_axes
from burst_cli.options import from_folder
from burst_cli.overrides import Axis
from burst_cli.plan.memory_check import MemoryPlanner
from burst_cli.runs.sweeps import FORMAT, SweepError, SweepFolder, sweeps_dir
from burst_cli.sweep.plan import LaunchJudge, SweepPlan, build_sweep, cells_of, check_axes, check_legal
from burst_cli.sweep.request import SweepRequest
from burst_cli.sweep.runner import Lane, SweepRunner
from burst_cli.sweep.view import SweepView, expectation, plan_view, tally
from cluster.control.attempt import StopRequests
from cluster.control.runner import runner_for
from cluster.launch.local import probe_local_node
from cluster.ssh.hosts import parse_nodes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig


def sweep_request(request: SweepRequest, *, dry_run: bool, as_json: bool) -> int:
    """The exit code of the sweep that `request` means, or 0 once a rehearsal has shown it."""
    console = render.stderr()
    overrides, folders = from_folder(request.folder, request.overrides or (), request.config_dir or ())
    request = replace(request, folder=None, overrides=list(overrides), config_dir=list(folders))
    with console.status("composing and checking the cells"):
        plan, lanes = plan_sweep(request)
    if dry_run:
        render.show(plan.to_dict(), plan_view(plan, request.parallel), as_json=as_json)
        return 0
    folder, was_there = open_sweep(request.runs_dir.absolute(), plan)
    how = "goes on in" if was_there else "is recorded in"
    where = Text(f"sweep {folder.sweep_id} {how} {folder.path}", style="dim")
    render.say(console, expectation(plan, request.parallel), where)
    stop = StopRequests()
    with stop.listening(), console.status("") as status:
        cells = SweepRunner(folder, request, lanes, SweepView(console, status.update), stop).run()
    document = {"sweep_id": folder.sweep_id, "path": str(folder.path), "cells": cells}
    if as_json:
        render.emit_json(document)
    else:
        from burst_cli.report.build import build_report
        from burst_cli.report.write import report_view

        out = render.stdout()
        table = report_view(build_report(request.runs_dir.absolute(), sweep=folder.sweep_id), out.width)
        render.say(out, table, tally(cells), f"more: burst report --sweep {folder.sweep_id} --output report.html")
    failed = any(cell["state"] in ("failed", "pending", "running") for cell in cells)
    return EXIT_INTERRUPTED if stop.count else int(failed)


def plan_sweep(request: SweepRequest) -> tuple[SweepPlan, tuple[Lane, ...]]:
    """The checked plan and where its cells run. Raises ConfigError that names every mistake; nothing was created."""
    if request.name is not None and not re.fullmatch(r"\w[\w.-]*", request.name, re.ASCII):
        raise ConfigError(f"--name {request.name!r}: expected letters, digits, dots and dashes; it names a folder")
    overrides, folders = request.overrides or (), request.config_dir or ()
    axes = sweep_axes(overrides, folders)
    check_axes(axes)
    facts = probe_local_node()
    lanes = _lanes(request, axes, facts.gpus)

    def compose_cell(words: Sequence[str]) -> RunConfig:
        return compose([*words, *lanes[0].overrides], folders).config  # all lanes have as many nodes

    def recorded(sweep_id: str) -> dict[str, str | None]:
        """What an earlier command of the same sweep found out; with --force nothing is held against a cell."""
        folder = SweepFolder(sweeps_dir(request.runs_dir.absolute()) / sweep_id)
        if request.force or not folder.file.exists():
            return {}
        return {str(cell["id"]): cell.get("short_of_memory") for cell in folder.read()["cells"]}

    judge = LaunchJudge(facts, MemoryPlanner(), request.force, request.runs_dir)
    plan = build_sweep(overrides, axes, compose_cell, judge, name=request.name, recorded=recorded)
    check_legal(plan, skip_illegal=request.skip_illegal)
    return plan, lanes


def open_sweep(runs_dir: Path, plan: SweepPlan) -> tuple[SweepFolder, bool]:
    """(the folder of `plan`, whether it was there before); the same cells were recorded by an earlier command."""
    folder = SweepFolder(sweeps_dir(runs_dir) / plan.sweep_id)
    try:
        (folder.path / "cells").mkdir(parents=True, exist_ok=True, mode=0o700)
        if not folder.file.exists():
            with folder.locked():  # of two that begin at once, one makes it
                if not folder.file.exists():
                    begun = {"run_path": None, "lane": None, "launches": 0, "refused": None}
                    cells = [{**cell.to_dict(), **begun} for cell in plan.cells]
                    folder.write({**plan.to_dict(), "format": FORMAT, "cells": cells})
                    return folder, False
    except OSError as error:
        raise SweepError(f"the sweep folder {folder.path} cannot be written: {error.strerror}") from error
    recorded = {cell.get("id") for cell in folder.read()["cells"]}
    if recorded != {cell.cell_id for cell in plan.cells}:
        raise SweepError(f"{folder.path} holds another sweep of the same name; give this one a name with --name")
    return folder, True


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
            return compose(words, request.config_dir or ()).config
        except ConfigError:
            continue
    return None


def choose_lanes(names: Sequence[str], parallel: int, *, gpus: int = 0, is_queued: bool = False) -> tuple[Lane, ...]:
    """Where cells run at the same time: on disjoint sets of neighbours of the nodes `names`, of equal size.

    Without names on this machine, or as jobs of a scheduler. Raises ConfigError where that cannot be.
    """
    if names:
        if len(names) % parallel:
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
