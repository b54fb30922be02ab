"""The preparation of data as a person watches it: a line per stage, and on a terminal how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from burst_cli import render
from engine.data.build import Progress, ProgressCallback, Stage
from engine.runs.figures import binary_bytes

STAGES: dict[Stage, str] = {
    "waiting": "waiting for another process",
    "survey": "reading the corpus",
    "tokenizer": "training the tokenizer",
    "encode": "writing tokens",
}


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for `engine.data.prepare` that tells on `console`; nothing appears if there is nothing to do."""
    begun: set[Stage] = set()
    with console.status("") as status:

        def show(progress: Progress) -> None:
            stage, total = progress.stage, progress.total_text_bytes
            size = None if total is None else binary_bytes(total)
            if stage not in begun:
                begun.add(stage)
                render.say(console, STAGES[stage] + (f" ({size})" if size else ""))
            done = "" if stage == "waiting" else binary_bytes(progress.text_bytes) + (f" of {size}" if size else "")
            status.update(Text(done))

        yield show
