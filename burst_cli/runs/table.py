"""The table of `burst runs`: little is read of each run, so that hundreds take a moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, count, duration, fitting, percent, plain
from burst_cli.runs.choose import select_runs
from burst_cli.runs.failure import failure_line
from burst_cli.runs.read import last_rows, last_step, read_facts
from burst_cli.runs.state import RunState, glance_at
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
# Title and rank: who stays on a narrow terminal, lowest first. Speed, loss and MFU go last, after the names of the run.
_COLUMNS = {
    "run": 0,
    "state": 1,
    "step": 5,
    "tokens/s\n/device": 2,
    "MFU": 4,
    "loss": 3,
    "time": 6,
    "nodes x\nranks": 7,
}
_LEAST_WITH_REASONS = 60  # columns; from there on a quarter of them is for why a run failed
_GAP = 1


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
    cells = [_cells(entry) for entry in entries]
    reasons = [_reason(entry) for entry in entries]
    titles = [title for title in _COLUMNS if any(row[title] != DASH for row in cells)]
    room = width - (width // 4 if any(reasons) and width >= _LEAST_WITH_REASONS else 0)
    if sum(_widths(titles, cells)) > room:
        cells = [
            {**row, "run": f"{one.run.exp}/{one.run.run_id[-6:]}"} for row, one in zip(cells, entries, strict=True)
        ]
    widths = [min(wide, width // 2) for wide in _widths(titles, cells)]  # names may be as long as one likes
    titles = [titles[place] for place in fitting([_COLUMNS[title] for title in titles], widths, room)]
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0), width=width if any(reasons) else None
    )
    for title in titles:
        is_text = title in ("run", "state")
        table.add_column(title, no_wrap=True, justify="left" if is_text else "right", max_width=width // 2)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1 if any(reasons) else None)
    for row, reason in zip(cells, reasons, strict=True):
        styled = (Text(row[title], STATE_STYLES.get(row[title], "") if title == "state" else "") for title in titles)
        table.add_row(*styled, Text(reason, style="dim"))
    return table


def _widths(titles: Sequence[str], cells: Sequence[dict[str, str]]) -> list[int]:
    return [_GAP + max(*map(len, title.split("\n")), *(len(row[title]) for row in cells), 0) for title in titles]


def _cells(entry: Entry) -> dict[str, str]:
    facts, rows = read_facts(entry.run), last_rows(entry.run)
    document, step = entry.seen.document, last_step(rows)

    def figure(name: str) -> float | None:
        return next((value for row in rows if (value := number(row, name)) is not None), None)

    end = document.get("ended_at")
    is_open = entry.seen.shown in ("starting", "running")
    return {
        "run": f"{entry.run.exp}/{entry.run.run_id}",
        "state": entry.seen.shown,
        "step": DASH if step is None and not facts.steps else f"{step or 0}/{facts.steps or '?'}",
        "tokens/s\n/device": count(figure("tokens_per_s_per_device")),
        "MFU": percent(figure("mfu")),
        "loss": plain(figure("loss")),
        "time": duration(seconds_between(document.get("started_at"), end) if end or is_open else None),
        "nodes x\nranks": facts.shape or DASH,
    }


def _reason(entry: Entry) -> str:
    return entry.seen.problem or failure_line(entry.seen.document.get("failure"))
