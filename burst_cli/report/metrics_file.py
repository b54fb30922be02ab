"""Rows of metrics.jsonl: all of a file of ordinary size, an even sample of a huge one. Never raises."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from burst_cli.report.values import Record, number, whole

_WHOLE_BYTES = 8 * 2**20
_SAMPLES = 2000
_LONGEST_LINE = 64 * 1024


def metric_rows(path: Path, *, all_rows: bool = False) -> list[dict[str, Any]]:
    """Rows by step, the later of two counts; of a file above 8 MiB 2,000 lines evenly spread, unless `all_rows`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            lines = _all_lines(file) if all_rows or size <= _WHOLE_BYTES else _sampled_lines(file, size)
            rows = {row["step"]: row for line in lines if (row := _row(line)) is not None}
    except OSError:
        return []
    return [rows[step] for step in sorted(rows)]


def run_rows(run_path: Path, *, all_rows: bool = False) -> list[dict[str, Any]]:
    """As `metric_rows`, of all attempts of a run: of each the steps before those that the next one made."""
    rows: list[dict[str, Any]] = []
    for folder in (*_earlier_attempts(run_path), run_path):
        newer = metric_rows(folder / "metrics.jsonl", all_rows=all_rows)
        rows = [row for row in rows if not newer or row["step"] < newer[0]["step"]] + newer
    return rows


def _earlier_attempts(run_path: Path) -> list[Path]:
    """attempts/1, attempts/2, ... in this order."""
    try:
        found = [path for path in (run_path / "attempts").iterdir() if path.name.isascii() and path.name.isdigit()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def series(rows: Iterable[Record], name: str) -> list[tuple[int, float]]:
    """(step, value) of one figure, steps without it left out."""
    return [(row["step"], value) for row in rows if (value := number(row, name)) is not None]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: neighbours become their mean, so nothing that lasts is lost."""
    size = -(-len(points) // most) if points else 1
    groups = (points[index : index + size] for index in range(0, len(points), size))
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in groups]


def _all_lines(file: BinaryIO) -> Iterable[bytes]:
    file.seek(0)
    return file.read().split(b"\n")


def _sampled_lines(file: BinaryIO, size: int) -> Iterable[bytes]:
    """The first whole line after each of evenly spaced places, and the last one."""
    for index in range(_SAMPLES):
        file.seek(max(0, index * size // _SAMPLES - 1))
        if index:
            file.readline(_LONGEST_LINE)
        yield file.readline(_LONGEST_LINE)
    file.seek(max(0, size - _LONGEST_LINE))
    yield from file.read().split(b"\n")[-2:]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and whole(row, "step") is not None else None
