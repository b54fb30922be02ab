"""The preparation of data as a person watches it: a bar on a terminal, a line per stage anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from burst_cli.figures import binary_bytes, count
from engine.data.build import Progress, ProgressCallback, Stage

STAGES: dict[Stage, str] = {
    "waiting": "waiting for another process",
    "survey": "reading the corpus",
    "tokenizer": "training the tokenizer",
    "encode": "writing tokens",
}


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for `engine.data.prepare` that draws on `console`; nothing appears if there is nothing to do."""
    if not console.is_terminal:
        yield _PlainView(console)
        return
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        _FiguresColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        yield _BarView(bars)


def figures(progress: Progress) -> str:
    """How far a stage is, in words: 3.4 MiB of 12 MiB, 950K tokens."""
    if progress.stage == "waiting":
        return ""
    total = f" of {binary_bytes(progress.total_text_bytes)}" if progress.total_text_bytes is not None else ""
    tokens = f", {count(progress.tokens)} tokens" if progress.stage == "encode" else ""
    return binary_bytes(progress.text_bytes) + total + tokens


class _FiguresColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["figures"]))


class _BarView:
    """One bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[Stage, int] = {}

    def __call__(self, progress: Progress) -> None:
        stage, total = progress.stage, progress.total_text_bytes
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(STAGES[stage], total=total, figures="")
        task = self._bars.tasks[self._tasks[stage]]
        self._bars.update(task.id, completed=progress.text_bytes, total=total, figures=figures(progress))


class _PlainView:
    """One line when a stage begins; nothing that is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: Stage | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            total = progress.total_text_bytes
            size = "" if total is None else f" ({binary_bytes(total)})"
            self._console.print(Text(STAGES[progress.stage] + size), soft_wrap=True)
