"""`burst runs`: what ran, what runs, how it ended. Little is read of each run, so that hundreds take a moment."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import RUNS_DIR, JsonOption, RunsDirOption
from burst_cli.render import Column, fitted_table
from burst_cli.runs.choose import elsewhere_text, select_runs
from burst_cli.runs.failure import failure_line
from burst_cli.runs.read import STATE_STYLES, read_progress, run_record, try_read_run_state
from cluster.control.attempt import RunState
from cluster.remote_text import seconds_between
from engine.runs.figures import DASH, count, duration, percent, plain
from engine.runs.folder import RunFolder

app = new_verb()

TABLE_RUNS = 25
# The states of run.json, and two that are read off them.
State = enum.StrEnum("State", "planned starting running completed failed cancelled oom lost unreadable")

# Speed, loss and MFU go last on a narrow terminal, after the names of the run.
_COLUMNS = (
    Column("run", 0, is_number=False),
    Column("state", 1, is_number=False),
    Column("step", 5),
    Column("tokens/s\n/device", 2),
    Column("MFU", 4),
    Column("loss", 3),
    Column("time", 6),
    Column("nodes x\nranks", 7),
)


@app.command()
def runs(
    state: Annotated[
        list[State] | None,
        typer.Option(
            "--state",
            help="Only runs in this state; lost: not ended, but nobody controls it. May be repeated.",
        ),
    ] = None,
    exp: Annotated[
        list[str] | None, typer.Option("--exp", help="Only runs of this experiment. May be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help=f"The newest N only; default: {TABLE_RUNS}, with --json all.")
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first: state, step, speed, MFU, loss, duration, nodes x ranks, and why one failed.

    Exit code 0, also when there are none. A run marked `lost` says that it runs, but the process that controlled it is
    gone: `burst status RUN` finds out what became of it, `burst resume RUN` takes it over.
    """
    runs = [run for run in reversed(select_runs(runs_dir, ())) if not exp or run.exp in exp]
    glances = ((run, try_read_run_state(run)) for run in runs)
    found = [(run, seen) for run, seen in glances if not state or {seen.shown, seen.state} & set(state)]
    shown = found[: limit or (None if as_json else TABLE_RUNS)]
    if as_json:
        render.emit_json({"runs": [run_record(run) for run, _ in shown], "total": len(found)})
        return
    console = render.stdout()
    if not shown:
        of = " of this kind" if state or exp else ""
        none = f"No runs{of} in {runs_dir.absolute()}."
        none += "" if of else elsewhere_text()
        render.say(console, f"{none} Start one with `burst launch exp=tiny`.")
        return
    console.print(runs_table(shown, console.width))
    if len(shown) < len(found):
        render.say(console, Text(f"{len(found) - len(shown)} older runs: --limit {len(found)}", "dim"))


def runs_table(entries: Sequence[tuple[RunFolder, RunState]], width: int) -> Table:
    """One row per run; on a narrow terminal ids are short, and the columns that matter least are left out."""
    reasons = (seen.problem or failure_line(seen.document.get("failure")) for _, seen in entries)
    notes = [Text(reason, style="dim") for reason in reasons]
    short = [f"{run.exp}/{run.run_id[-6:]}" for run, _ in entries]
    return fitted_table(_COLUMNS, [_cells(*entry) for entry in entries], notes, width, short=short)[0]


def _cells(run: RunFolder, seen: RunState) -> list[Text]:
    progress = read_progress(run, seen)
    facts, state, end = progress.facts, seen.shown, seen.document.get("ended_at")
    is_known = end or state in ("starting", "running")
    return [
        Text(f"{run.exp}/{run.run_id}"),
        Text(state, STATE_STYLES.get(state, "")),
        Text(f"{progress.step}/{facts.steps or '?'}" if progress.latest or facts.steps else DASH),
        Text(count(progress.figure("tokens_per_s_per_device"))),
        Text(percent(progress.figure("mfu"))),
        Text(plain(progress.figure("loss"))),
        Text(duration(seconds_between(seen.document.get("started_at"), end) if is_known else None)),
        Text(facts.shape or DASH),
    ]
