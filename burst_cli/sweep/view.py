"""A sweep as people see it: before it starts, and while its cells run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from burst_cli import render
from burst_cli.render import clean, listing
from burst_cli.runs.read import RunProgress
from burst_cli.sweep.plan import Cell, SweepPlan, title_of, total
from cluster.remote_text import one_line
from engine.runs.figures import DASH, count, duration, plain
from engine.runs.folder import RunFolder

_MESSAGE = 70


def plan_view(plan: SweepPlan, parallel: int) -> Group:
    """What a sweep will do: its cells, what each is expected to take, and all of them together."""
    rows: list[list[str | Text]] = []
    for cell in plan.cells:
        known = cell.estimate if _will_run(cell) else None
        why, style = (cell.problems[0], "red") if cell.problems else (cell.short_of_memory or "", "magenta")
        times = [duration(known.seconds), f"{known.device_hours:.3g}"] if known else [DASH, DASH]
        values = [cell.values.get(key, "") for key in plan.keys]
        rows.append([cell.cell_id, *values, *times, Text(one_line(why, _MESSAGE), style)])
    numbers = ("expected", "device hours")
    return Group(listing(("cell", *plan.keys, *numbers, ""), rows, numbers), expectation(plan, parallel))


def _will_run(cell: Cell) -> bool:
    return not cell.problems and not cell.short_of_memory


def expectation(plan: SweepPlan, parallel: int) -> Text:
    """How long the cells that will run are expected to take together, and what that rests on."""
    estimates = [cell.estimate for cell in plan.cells if _will_run(cell)]
    lanes = f", {parallel} at a time" if parallel > 1 else ""
    text = Text(f"{len(estimates)} of {len(plan.cells)} cells will run{lanes}")
    whole = total(estimates, parallel)
    if whole is None:
        missing = sum(one is None for one in estimates)
        if missing:
            text.append(f"; no estimate of time: a step of {missing} of them cannot be predicted from here", "dim")
        return text
    seconds, hours = whole
    text.append(f"; about {duration(seconds)}, {hours:.3g} device hours")
    sources = list(dict.fromkeys(one.source for one in estimates if one is not None))
    text.append(f"\nby {sources[0]}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else ""), "dim")
    return text


def tally(cells: Sequence[Mapping[str, Any]]) -> str:
    """`12 of 24 cells done: 10 completed, 1 oom, 1 failed`."""
    states = [cell["state"] for cell in cells]
    done = [state for state in states if state not in ("running", "pending")]
    parts = [f"{done.count(state)} {state}" for state in dict.fromkeys(done)]
    return f"{len(done)} of {len(cells)} cells done" + (f": {', '.join(parts)}" if parts else "")


class SweepView:
    """A line per change of a cell; on a terminal how far those are that run stands below."""

    def __init__(self, console: Console, show: Callable[[Text], None]) -> None:
        self._console, self._show = console, show
        self._said: dict[str, str] = {}
        self._runs: dict[str, RunProgress] = {}

    def note(self, text: str) -> None:
        """Something that a person should know."""
        render.say(self._console, Text(clean(text), "yellow"))

    def tick(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Show the cells as they are recorded; called several times a second."""
        for number, cell in enumerate(cells, 1):
            before, now = self._said.get(cell["id"]), cell["state"]
            if now != before and not (before is None and now == "pending"):
                render.say(self._console, clean(f"[{number}/{len(cells)}] {_line(cell)}"))
            self._said[cell["id"]] = now
        running = [
            f"{title_of(cell['values'])}: {self._progress(cell)}" for cell in cells if cell["state"] == "running"
        ]
        self._show(Text("; ".join([tally(cells), *running])))

    def _progress(self, cell: Mapping[str, Any]) -> str:
        """`step 12, loss 4.21, 3.1K tokens/s`: how far the run of a cell is."""
        path = cell.get("run_path")
        if not path:
            return "starting"
        if path not in self._runs:
            self._runs[path] = RunProgress(RunFolder(Path(path)))
        progress = self._runs[path]
        progress.poll()
        if progress.latest is None:
            return "starting"
        loss, speed = plain(progress.figure("loss")), count(progress.figure("tokens_per_s"))
        return f"step {progress.step}, loss {loss}, {speed} tokens/s"


def _line(cell: Mapping[str, Any]) -> str:
    """Which cell is how, and why it has no figures."""
    result = cell.get("result") or {}
    state = f"{cell['state']} (predicted)" if result.get("predicted") else cell["state"]
    note = one_line(result.get("message") or next(iter(cell.get("problems") or ()), ""), _MESSAGE)
    return f"{title_of(cell['values'])}: {state}" + (f"  {note}" if note else "")
