"""Lengths against methods: one figure per cell, and what is missing or failed said in its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burst_cli.figures import binary_bytes, count, percent
from burst_cli.report.select import Group
from burst_cli.report.values import Record, is_above_peak, method_of, number, tokens, whole

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
    rows = [(tokens(length), _row([cells.get((length, method), []) for method in methods])) for length in lengths]
    return Matrix(tuple(methods), tuple(rows))


def _row(runs: Sequence[Sequence[Record]]) -> tuple[Cell, ...]:
    shown = [_shown(records) for records in runs]
    speeds = [_speed(record) if record is not None else None for record in shown]
    fastest = max((speed for speed in speeds if speed is not None), default=None)
    return tuple(
        _cell(record, len(records), speed is not None and speed == fastest)
        for record, records, speed in zip(shown, runs, speeds, strict=True)
    )


def _shown(records: Sequence[Record]) -> Record | None:
    """The newest completed run, else the newest: a later failure does not hide a result."""
    completed = [record for record in records if record.get("status") == "completed"]
    return next(reversed(completed or records), None)


def _cell(record: Record | None, runs: int, best: bool) -> Cell:
    if record is None:
        return Cell(NOT_RUN, "", NOT_RUN)
    status = _LOST if record.get("alive") is False else str(record.get("status"))
    speed = _speed(record)
    if status != "completed" or speed is None:
        return Cell("OOM" if status == "oom" else status, "", status)
    details = [percent(number(record, "mfu")), binary_bytes(number(record, "peak_memory_bytes"))]
    if is_above_peak(record):
        details[0] += " !"
    if runs > 1:
        details.append(f"{runs} runs")
    return Cell(count(speed), " · ".join(details), status, best)


def _speed(record: Record) -> float | None:
    return number(record, "tokens_per_s_per_device") if record.get("status") == "completed" else None
