"""What preparation reports while it works: plain values; how they are drawn is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["waiting", "survey", "tokenizer", "encode"]


@dataclass(frozen=True)
class Progress:
    """How far one stage has come. Stages: waiting (another process prepares), survey, tokenizer, encode."""

    stage: Stage
    documents: int = 0
    text_bytes: int = 0  # UTF-8 bytes of text handled in this stage
    tokens: int = 0  # tokens written; 0 before the stage "encode"
    total_text_bytes: int | None = None  # known once the survey is over


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Nothing: the callback of a caller who does not want to know."""
