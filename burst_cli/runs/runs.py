"""`burst runs`: what ran, what runs, how it ended."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption, RunsDirOption

app = new_verb()

TABLE_RUNS = 25


class State(enum.StrEnum):
    """What `--state` takes: the states of run.json, and two that are read off them."""

    planned = "planned"
    starting = "starting"
    running = "running"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"
    oom = "oom"
    lost = "lost"
    unreadable = "unreadable"


@app.command()
def runs(
    state: Annotated[
        list[State] | None,
        typer.Option(
            "--state",
            help="Only runs in this state; lost: not ended, but nobody controls it. May be repeated.",
            show_default=False,
        ),
    ] = None,
    exp: Annotated[
        list[str] | None,
        typer.Option("--exp", help="Only runs of this experiment. May be repeated.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help=f"The newest N only; default: {TABLE_RUNS}, with --json all.", show_default=False
        ),
    ] = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first: state, step, speed, MFU, loss, duration, nodes x ranks, and why one failed.

    Exit code 0, also when there are none. A run marked `lost` says that it runs, but the process that controlled it is
    gone: `burst status RUN` finds out what became of it, `burst resume RUN` takes it over.
    """
    from burst_cli import render
    from burst_cli.runs.table import list_entries, runs_table
    from engine.runs.folder import default_runs_dir

    root = runs_dir or default_runs_dir()
    wanted = {str(name) for name in state or ()}
    found = list_entries(root, wanted, set(exp or ()))
    shown = found[: limit or (None if as_json else TABLE_RUNS)]
    if as_json:
        from burst_cli.runs.read import run_record

        render.emit_json({"runs": [run_record(entry.run) for entry in shown], "total": len(found)})
        return
    console = render.stdout()
    if not shown:
        of = " of this kind" if wanted or exp else ""
        console.print(f"No runs{of} in {root.absolute()}. Start one with `burst launch exp=tiny`.", markup=False)
        return
    console.print(runs_table(shown, console.width))
    if len(shown) < len(found):
        console.print(f"{len(found) - len(shown)} older runs: --limit {len(found)}", style="dim", markup=False)
