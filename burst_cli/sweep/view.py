"""A sweep as people see it: before it starts, while its table fills, and at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, clean, count, duration, percent, plain
from burst_cli.sweep.estimate import Estimate, total
from burst_cli.sweep.plan import SweepPlan
from engine.run.records import JsonLinesTail

_STYLES = {
    "completed": "green",
    "running": "bold cyan",
    "failed": "red",
    "oom": "magenta",
    "cancelled": "yellow",
    "illegal": "red",
    "pending": "dim",
}
_REDRAW_S = 0.5
_MESSAGE = 70


def plan_view(plan: SweepPlan, parallel: int, price: float | None) -> Group:
    """What a sweep will do: its cells, what each is expected to take, and all of them together."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    keys = [axis.key for axis in plan.axes if axis.is_sweep]
    for key in ("cell", *keys):
        table.add_column(key)
    table.add_column("expected", justify="right")
    table.add_column("device hours", justify="right")
    table.add_column("")
    for cell in plan.cells:
        known = cell.estimate if not cell.problems and not cell.short_of_memory else None
        note = (
            Text(_first(cell.problems), "red") if cell.problems else Text(_cut(cell.short_of_memory or ""), "magenta")
        )
        table.add_row(
            cell.cell_id,
            *(Text(cell.values.get(key, "")) for key in keys),
            duration(known.seconds) if known else "–",
            f"{known.device_hours:.3g}" if known else "–",
            note,
        )
    return Group(table, expectation(plan, parallel, price))


def expectation(plan: SweepPlan, parallel: int, price: float | None) -> Text:
    """How long the cells that will run are expected to take together, what they cost, and what that rests on."""
    runs = [cell for cell in plan.cells if not cell.problems and not cell.short_of_memory]
    lanes = f", {parallel} at a time" if parallel > 1 else ""
    text = Text(f"{len(runs)} of {len(plan.cells)} cells will run{lanes}")
    estimates: list[Estimate | None] = [cell.estimate for cell in runs]
    whole = total(estimates, parallel)
    if whole is None:
        missing = sum(one is None for one in estimates)
        text.append(f"; no estimate of time: nothing like {missing} of them was measured yet", "dim")
        return text
    seconds, hours = whole
    text.append(f"; about {duration(seconds)}, {hours:.3g} device hours")
    if price is not None:
        text.append(f", {hours * price:,.2f} at {price:g} per device hour")
    sources = list(dict.fromkeys(one.source for one in estimates if one is not None))
    text.append(f"\nby {sources[0]}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else ""), "dim")
    return text


def cells_table(cells: Sequence[Mapping[str, Any]], progress: Mapping[str, str], rows: int | None = None) -> Table:
    """All cells with what is known of each; `rows`: at most so many, around those that run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    keys = list(dict.fromkeys(key for cell in cells for key in cell["values"]))
    for key in (*keys, "state"):
        table.add_column(key, no_wrap=True)
    for title in ("tokens/s/device", "MFU", "peak memory", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True)
    shown = window(cells, rows)
    for cell in shown:
        result = cell.get("result") or {}
        note = progress.get(cell["id"]) or _note(cell)
        table.add_row(
            *(Text(str(cell["values"].get(key, ""))) for key in keys),
            Text(_state_text(cell), _STYLES.get(cell["state"], "")),
            count(result.get("tokens_per_s_per_device")),
            percent(result.get("mfu")),
            binary_bytes(result.get("peak_memory_bytes")),
            plain(result.get("final_train_loss")),
            Text(note, "dim"),
        )
    return table


def window(cells: Sequence[Mapping[str, Any]], rows: int | None) -> Sequence[Mapping[str, Any]]:
    """At most `rows` cells in a row: the last that have a result, those that run, the next."""
    if rows is None or len(cells) <= rows:
        return cells
    active = [index for index, cell in enumerate(cells) if cell["state"] == "running"]
    done = [index for index, cell in enumerate(cells) if cell["state"] not in ("running", "pending")]
    centre = active[0] if active else (done[-1] if done else 0)
    first = max(0, min(centre - rows // 2, len(cells) - rows))
    return cells[first : first + rows]


def tally(cells: Sequence[Mapping[str, Any]]) -> str:
    """`12 of 24 cells done: 10 completed, 1 oom, 1 failed; 2 running`."""
    states = [cell["state"] for cell in cells]
    done = [state for state in states if state not in ("running", "pending")]
    parts = [f"{done.count(state)} {state}" for state in dict.fromkeys(done)]
    running = states.count("running")
    return (
        f"{len(done)} of {len(cells)} cells done"
        + (f": {', '.join(parts)}" if parts else "")
        + (f"; {running} running" if running else "")
    )


class SweepView:
    """Shows a sweep while it runs: a table that is redrawn on a terminal, a line per change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._said: dict[str, str] = {}
        self._tails: dict[str, _Steps] = {}
        self._next = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """See `SweepObserver`."""
        self._console.print(Text(clean(text), "yellow"), soft_wrap=True)

    def tick(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """See `SweepObserver`."""
        now = time.monotonic()
        if self._live is None:
            self._say_changes(cells)
        elif now >= self._next:
            self._next = now + _REDRAW_S
            self._live.update(self._picture(cells), refresh=True)

    def _picture(self, cells: Sequence[Mapping[str, Any]]) -> RenderableType:
        progress = {cell["id"]: self._progress(cell) for cell in cells if cell["state"] == "running"}
        rows = max(3, self._console.height - 6)
        elapsed = duration(time.monotonic() - self._began)
        return Group(cells_table(cells, progress, rows), Text(f"{tally(cells)}   {elapsed}", "bold"))

    def _progress(self, cell: Mapping[str, Any]) -> str:
        path = cell.get("run_path")
        if not path:
            return "starting"
        if cell["id"] not in self._tails or self._tails[cell["id"]].path != path:
            self._tails[cell["id"]] = _Steps(path)
        return self._tails[cell["id"]].text()

    def _say_changes(self, cells: Sequence[Mapping[str, Any]]) -> None:
        for number, cell in enumerate(cells, 1):
            before, now = self._said.get(cell["id"]), cell["state"]
            if now != before and not (before is None and now == "pending"):
                note = _note(cell)
                line = f"[{number}/{len(cells)}] {_title(cell)}: {_state_text(cell)}" + (f"  {note}" if note else "")
                self._console.print(Text(clean(line)), soft_wrap=True)
            self._said[cell["id"]] = now


class _Steps:
    """How far the run in folder `path` is, from what its ranks recorded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._metrics = JsonLinesTail(Path(path) / "metrics.jsonl")
        self._last: Mapping[str, Any] | None = None

    def text(self) -> str:
        """`step 12, loss 4.21, 3.1K tokens/s`; empty words before the first step."""
        rows = self._metrics.poll()
        self._last = rows[-1] if rows else self._last
        if self._last is None:
            return "starting"
        loss = self._last.get("loss")
        return f"step {self._last.get('step')}, loss {plain(loss)}, {count(self._last.get('tokens_per_s'))} tokens/s"


def _state_text(cell: Mapping[str, Any]) -> str:
    predicted = (cell.get("result") or {}).get("predicted")
    return f"{cell['state']} (predicted)" if predicted else str(cell["state"])


def _title(cell: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in cell["values"].items())


def _note(cell: Mapping[str, Any]) -> str:
    """Why a cell has no figures, in one line."""
    message = (cell.get("result") or {}).get("message") or _first(cell.get("problems") or ())
    return _cut(message)


def _first(problems: Sequence[str]) -> str:
    return _cut(problems[0]) if problems else ""


def _cut(text: str) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= _MESSAGE else line[: _MESSAGE - 1] + "…"
