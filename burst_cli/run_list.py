"""Rows of `burst runs`: little is read of each run, so that hundreds take a moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, duration, plain
from burst_cli.run_facts import is_lost, last_rows, number, read_facts, seconds_between, word
from engine.runs import RunFolder, RunFolderError, list_runs

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
_WIDE = 100
_NARROW = 60


@dataclass(frozen=True)
class Entry:
    """One run of the list; `state` is that of run.json, or lost, or unreadable."""

    run: RunFolder
    state: str
    document: Mapping[str, Any]
    problem: str | None = None


def list_entries(root: Path, states: Collection[str], exps: Collection[str]) -> list[Entry]:
    """The runs below `root` in these states and experiments (none given: all), newest first."""
    runs = [run for run in list_runs(root) if not exps or run.exp in exps]
    entries = [_entry(run) for run in reversed(runs)]
    return [entry for entry in entries if not states or entry.state in states or entry.document.get("state") in states]


def runs_table(entries: Sequence[Entry], width: int) -> Table:
    """One row per run; a narrow terminal goes without some columns, and the reason of a failure is cut first."""
    is_wide = width >= _WIDE
    titles = ["run", "state", "step", *(("loss", "time", "nodes x ranks") if is_wide else ())]
    rows = [_cells(entry, width) for entry in entries]
    has_reasons = any(row[-1] for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold", width=width if has_reasons else None)
    for index, title in enumerate(titles):
        widest = max(len(title), *(len(row[index]) for row in rows))
        room = min(widest, width // 2)  # an experiment's name may be as long as its author likes
        table.add_column(title, no_wrap=True, width=room, justify="left" if index < 2 else "right")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1 if has_reasons else None)
    for row in rows:
        table.add_row(*row)
    return table


def _entry(run: RunFolder) -> Entry:
    try:
        document = run.read_state()
    except RunFolderError as error:
        return Entry(run, "unreadable", {}, str(error))
    return Entry(run, "lost" if is_lost(run, document) else document["state"], document)


def _cells(entry: Entry, width: int) -> list[Text]:
    facts, rows = read_facts(entry.run), last_rows(entry.run)
    step = next((row["step"] for row in reversed(rows) if isinstance(row.get("step"), int)), None)
    loss = next((value for row in reversed(rows) if (value := number(row, "loss")) is not None), None)
    progress = DASH if step is None and not facts.steps else f"{step or 0}/{facts.steps or '?'}"
    cells = [
        Text(f"{entry.run.exp}/{entry.run.run_id if width >= _NARROW else entry.run.run_id[-6:]}"),
        Text(entry.state, style=STATE_STYLES.get(entry.state, "")),
        Text(progress),
    ]
    if width >= _WIDE:
        document = entry.document
        end = document.get("ended_at")
        is_open = entry.state in ("starting", "running")
        time_s = seconds_between(document.get("started_at"), end) if end or is_open else None
        cells += [Text(plain(loss)), Text(duration(time_s)), Text(facts.shape or DASH)]
    return [*cells, Text(entry.problem or failure_line(entry.document.get("failure")), style="dim")]


def failure_line(failure: Any) -> str:
    """Who failed with what, in one line; empty without a failure."""
    if not isinstance(failure, Mapping):
        return ""
    rank, host = number(failure, "rank"), word(failure, "host")
    who = f"rank {rank:.0f}{f' on {host}' if host else ''}: " if rank is not None else ""
    what = word(failure, "type", 60)
    message = word(failure, "message", 200)
    return f"{who}{': '.join(filter(None, [what, message]))}"
