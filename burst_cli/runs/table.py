"""The table of `burst runs`: little is read of each run, so that hundreds take a moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, count, duration, percent, plain
from burst_cli.runs.choose import select_runs
from burst_cli.runs.failure import failure_line
from burst_cli.runs.read import last_rows, last_step, read_facts
from burst_cli.runs.state import RunState, glance_at
from burst_cli.tables import Column, fitted_table, is_too_wide
from burst_cli.values import number, seconds_between
from engine.runs.folder import RunFolder

STATE_STYLES = {
    "planned": "dim",
    "starting": "cyan",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "oom": "red",
    "cancelled": "yellow",
    "lost": "bold magenta",
    "unreadable": "bold red",
}
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


@dataclass(frozen=True)
class Entry:
    """One run of the list."""

    run: RunFolder
    seen: RunState


def list_entries(root: Path, states: Collection[str], exps: Collection[str]) -> list[Entry]:
    """The runs below `root` in these states and experiments (none given: all), newest first."""
    runs = [run for run in select_runs(root, ()) if not exps or run.exp in exps]
    entries = [Entry(run, glance_at(run)) for run in reversed(runs)]
    return [one for one in entries if not states or one.seen.shown in states or one.seen.state in states]


def runs_table(entries: Sequence[Entry], width: int) -> Table:
    """One row per run; on a narrow terminal ids are short, and the columns that matter least are left out."""
    rows = [_cells(entry) for entry in entries]
    notes = [Text(_reason(entry), style="dim") for entry in entries]
    told = [place for place in range(len(_COLUMNS)) if any(row[place].plain != DASH for row in rows)]
    rows = [[row[place] for place in told] for row in rows]
    columns = [_COLUMNS[place] for place in told]
    if is_too_wide(columns, rows, notes, width):
        short = [Text(f"{entry.run.exp}/{entry.run.run_id[-6:]}") for entry in entries]
        rows = [[name, *row[1:]] for name, row in zip(short, rows, strict=True)]
    return fitted_table(columns, rows, notes, width)


def _cells(entry: Entry) -> list[Text]:
    facts, rows = read_facts(entry.run), last_rows(entry.run)
    document, step, state = entry.seen.document, last_step(rows), entry.seen.shown

    def figure(name: str) -> float | None:
        return next((value for row in rows if (value := number(row, name)) is not None), None)

    end = document.get("ended_at")
    is_known = end or state in ("starting", "running")
    return [
        Text(f"{entry.run.exp}/{entry.run.run_id}"),
        Text(state, STATE_STYLES.get(state, "")),
        Text(DASH if step is None and not facts.steps else f"{step or 0}/{facts.steps or '?'}"),
        Text(count(figure("tokens_per_s_per_device"))),
        Text(percent(figure("mfu"))),
        Text(plain(figure("loss"))),
        Text(duration(seconds_between(document.get("started_at"), end) if is_known else None)),
        Text(facts.shape or DASH),
    ]


def _reason(entry: Entry) -> str:
    return entry.seen.problem or failure_line(entry.seen.document.get("failure"))
