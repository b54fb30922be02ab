"""`burst sweep`: many runs from one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burst_cli.app import EXIT_INTERRUPTED, new_verb
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument, RunsDirOption

if TYPE_CHECKING:
    from burst_cli.sweep.plan import SweepPlan
    from burst_cli.sweep.runner import Lane
    from burst_cli.sweep.store import SweepFolder

app = new_verb()


@app.command()
def sweep(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    runs_dir: RunsDirOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show and check every cell, with the time it takes; start nothing.")
    ] = False,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="Cells at the same time, on disjoint sets of nodes.")
    ] = 1,
    max_failures: Annotated[
        int | None, typer.Option("--max-failures", min=1, help="Start no more cells after so many failed ones.")
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option("--retry", metavar="RESULT", help="Run cells with this result again: failed, oom. Repeatable."),
    ] = None,
    skip_illegal: Annotated[
        bool, typer.Option("--skip-illegal", help="Record cells that cannot run as such, and run the others.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also run cells that are expected not to fit into memory.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Begins the sweep's id; another name runs the same cells anew.")
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Cost of one device hour, for the estimate.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run every combination of the listed values, one launch per cell, and fill a table.

    All cells are composed and checked before the first one starts. The same command typed again goes on where it was
    ended, by Ctrl-C or by anything else: a cell that has a result is not run twice. Running out of memory is a result.

    \b
    burst sweep exp=tiny train.seq_len=1024,2048,4096 attention=burst,ring,ulysses
        nine cells, one after the other
    burst sweep exp=llama7b_1m cluster=lab 'train.seq_len=range(262144,1048577,262144)' --parallel 2
        two at a time, each on half of the nodes
    burst sweep exp=tiny 'attention=glob(*)' --skip-illegal --dry-run
        which methods are legal here, and what each is expected to take

    Ctrl-C once stops the running cells at the end of their step; twice kills them. Exit codes: 0 every cell has a
    result and none failed, 1 some failed, 2 usage or configuration, 130 interrupted.
    """
    from burst_cli import render
    from burst_cli.sweep.request import SweepRequest, plan_sweep
    from burst_cli.sweep.view import expectation, plan_view

    request = SweepRequest(
        tuple(overrides or ()), tuple(config_dir or ()), _root(runs_dir), parallel, force, skip_illegal, name
    )
    retried = _retried(retry or [])
    with render.stderr().status("composing and checking the cells"):
        plan, lanes = plan_sweep(request)
    if dry_run:
        if as_json:
            render.emit_json(plan.to_dict())
        else:
            render.stdout().print(plan_view(plan, parallel, price))
        return
    render.stderr().print(expectation(plan, parallel, price), soft_wrap=True)
    cells, folder, interrupted = _run(plan, request.runs_dir, lanes, max_failures, retried, request.launch_arguments)
    _conclude(cells, folder, as_json=as_json)
    failed = any(cell["state"] in ("failed", "pending", "running") for cell in cells)
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else 1 if failed else 0)


def _run(
    plan: SweepPlan,
    runs_dir: Path,
    lanes: tuple[Lane, ...],
    max_failures: int | None,
    retry: frozenset[str],
    arguments: tuple[str, ...],
) -> tuple[list[dict[str, Any]], SweepFolder, bool]:
    """(the cells at the end, the sweep's folder, whether it was interrupted)."""
    from burst_cli import render
    from burst_cli.sweep.runner import SweepManner, SweepRunner
    from burst_cli.sweep.store import open_sweep
    from burst_cli.sweep.view import SweepView
    from cluster.control.outcome import StopRequests

    folder, was_there = open_sweep(runs_dir, plan)
    console = render.stderr()
    how = "goes on in" if was_there else "is recorded in"
    console.print(f"sweep {folder.sweep_id} {how} {folder.path}", style="dim", markup=False, soft_wrap=True)
    manner = SweepManner(runs_dir, lanes, arguments, max_failures, retry)
    stop = StopRequests()
    with stop.listening(), SweepView(console).shown() as view:
        cells = SweepRunner(folder, manner, view, stop).run()
    return cells, folder, stop.count > 0


def _conclude(cells: list[dict[str, Any]], folder: SweepFolder, *, as_json: bool) -> None:
    from rich.text import Text

    from burst_cli import render
    from burst_cli.sweep.view import cells_table, tally

    if as_json:
        render.emit_json({"sweep_id": folder.sweep_id, "path": str(folder.path), "cells": cells})
        return
    console = render.stdout()
    console.print(cells_table(cells, {}, console.width))
    console.print(Text(tally(cells)))
    console.print(Text(f"more: burst report --sweep {folder.sweep_id}"), soft_wrap=True)


def _root(runs_dir: Path | None) -> Path:
    from engine.runs.folder import default_runs_dir

    return (runs_dir or default_runs_dir()).absolute()


def _retried(names: list[str]) -> frozenset[str]:
    from engine.config.errors import ConfigError

    unknown = sorted(set(names) - {"failed", "oom"})
    if unknown:
        raise ConfigError(f"--retry {unknown[0]}: expected failed or oom")
    return frozenset(names)
