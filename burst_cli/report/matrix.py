"""Lengths against methods: one figure per cell, of all its completed runs, and what is missing or failed said in its
place. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burst_cli.figures import binary_bytes, count, percent
from burst_cli.report.select import Group
from burst_cli.report.values import Pooled, Record, is_above_peak, method_of, pooled, share_a_peak, tokens, whole

NOT_RUN = "not run"
_LOST = "lost"


@dataclass(frozen=True)
class Cell:
    """figure: the large line; details: the small one; status: of its newest run, or `not run`; best: of its row."""

    figure: str
    details: str
    status: str
    best: bool = False


@dataclass(frozen=True)
class Matrix:
    """A row per length (as people say it), a cell per method."""

    methods: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def method_matrix(group: Group) -> Matrix | None:
    """The matrix of a group with at least two methods and two lengths; else None, because its table says it all."""
    cells: dict[tuple[int, str], list[Record]] = {}
    for record in group.records:
        length, method = whole(record, "seq_len"), method_of(record)
        if length is not None and method is not None:
            cells.setdefault((length, method), []).append(record)
    lengths = sorted({length for length, _ in cells})
    methods = sorted({method for _, method in cells})
    if len(lengths) < 2 or len(methods) < 2:
        return None
    shows_mfu = share_a_peak(group.records)
    rows = [
        (tokens(length), _row([cells.get((length, method), []) for method in methods], shows_mfu=shows_mfu))
        for length in lengths
    ]
    return Matrix(tuple(methods), tuple(rows))


def _row(runs: Sequence[Sequence[Record]], *, shows_mfu: bool) -> tuple[Cell, ...]:
    """The cells of a length; the fastest is marked where there are two that may be ranked."""
    speeds = [pooled(records, "tokens_per_s_per_device") for records in runs]
    ranked = [speed.middle for speed in speeds if speed is not None and speed.may_rank]
    fastest = max(ranked) if len(ranked) > 1 else None
    return tuple(
        _cell(records, speed, is_best=speed is not None and speed.middle == fastest, shows_mfu=shows_mfu)
        for records, speed in zip(runs, speeds, strict=True)
    )


def _cell(records: Sequence[Record], speed: Pooled | None, *, is_best: bool, shows_mfu: bool) -> Cell:
    """A later failure does not hide a result."""
    if not records:
        return Cell(NOT_RUN, "", NOT_RUN)
    if speed is None:
        newest = records[-1]
        status = _LOST if newest.get("alive") is False else str(newest.get("status"))
        return Cell("OOM" if status == "oom" else status, "", status)
    mfu, memory = pooled(records, "mfu"), pooled(records, "peak_memory_bytes")
    warned = " !" if any(map(is_above_peak, records)) else ""
    details = [percent(mfu.middle if mfu else None) + warned] if shows_mfu else []
    details.append(binary_bytes(memory.middle if memory else None))
    if speed.runs > 1:
        details.append(f"{speed.runs} runs")
    return Cell(count(speed.middle), " · ".join(details), "completed", is_best)
