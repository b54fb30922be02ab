"""The preparation of data as a person watches it: a bar on a terminal, a line per stage anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
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
    tasks: dict[Stage, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[figures]}"))
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(progress: Progress) -> None:
            stage, total = progress.stage, progress.total_text_bytes
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES[stage], total=total, figures="")
                if not console.is_terminal:
                    size = "" if total is None else f" ({binary_bytes(total)})"
                    console.print(Text(STAGES[stage] + size), soft_wrap=True)
            bars.update(tasks[stage], completed=progress.text_bytes, total=total, figures=figures(progress))

        yield show


def figures(progress: Progress) -> str:
    """How far a stage is, in words: 3.4 MiB of 12 MiB, 950K tokens."""
    if progress.stage == "waiting":
        return ""
    total = f" of {binary_bytes(progress.total_text_bytes)}" if progress.total_text_bytes is not None else ""
    tokens = f", {count(progress.tokens)} tokens" if progress.stage == "encode" else ""
    return binary_bytes(progress.text_bytes) + total + tokens
