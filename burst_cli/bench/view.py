"""Measurements as tables. Pure: documents of `burst bench` in, rich tables out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, plain, seconds, seconds_between

Row = Mapping[str, Any]


def bench_view(document: Mapping[str, Any]) -> RenderableType:
    """One table per mask and length (or one of all lengths, for the loss), what was skipped, and the environment."""
    parts: list[RenderableType] = []
    if document["benchmark"] == "loss":
        parts.append(_loss_table(document["results"]))
    else:
        columns = EXCHANGE_COLUMNS if document["benchmark"] == "exchange" else ATTENTION_COLUMNS
        for (mask, seq_len), rows in cells(document["results"]).items():
            parts.append(_table(f"{document['benchmark']}, {mask}, {seq_len:,} tokens", columns, rows))
    parts += [Text(line, style="yellow") for line in skipped_lines(document["skipped"])]
    return Group(*parts, Text(_environment_line(document), style="dim"))


def cells(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows by (mask, length), in the order in which they were measured."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["mask"], row["seq_len"]), []).append(row)
    return found


def spread(timing: Mapping[str, Any] | None) -> str:
    """Median and, in parentheses, fastest to slowest."""
    if timing is None:
        return DASH
    return seconds_between(timing["median_s"], timing["min_s"], timing["max_s"])


def _ratio(row: Row) -> str:
    return f"{plain(row['time_over_first'], 2)}x"


def _sent(link: str) -> Callable[[Row], str]:
    return lambda row: binary_bytes(row["sent_bytes_all_ranks"][link])


def _speed(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]['mb_per_s_per_rank']:.3g}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
ATTENTION_COLUMNS: Columns = (
    ("total", lambda row: spread(row["total"])),
    ("time", _ratio),
    ("forward", lambda row: spread(row["forward"])),
    ("backward", lambda row: spread(row["backward"])),
    ("exposed", lambda row: seconds(row["exposed_s"]) if row["exposed_s"] >= 0 else f"-{seconds(-row['exposed_s'])}"),
    ("sent inside nodes", _sent("intra")),
    ("sent between nodes", _sent("inter")),
)
EXCHANGE_COLUMNS: Columns = (
    ("total", lambda row: spread(row["total"])),
    ("time", _ratio),
    ("forward", lambda row: spread(row["forward"])),
    ("MB/s per rank", _speed("forward")),
    ("backward", lambda row: spread(row["backward"])),
    ("MB/s per rank", _speed("backward")),
    ("sent inside nodes", _sent("intra")),
    ("sent between nodes", _sent("inter")),
)


def _table(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("variant")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(Text(row["variant"]), *(cell(row) for _, cell in columns))
    return table


def _loss_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="loss", title_justify="left")
    for heading in ("tokens", "fused", "plain", "time", "extra peak, fused", "extra peak, plain"):
        table.add_column(heading, justify="right")
    for row in rows:
        timings, peaks = row["timings"], row["peak_extra_bytes"]
        ratio = f"{plain(row['time_ratio'], 2)}x" if "time_ratio" in row else DASH
        times = (spread(timings.get(name)) for name in ("fused", "plain"))
        table.add_row(f"{row['rows']:,}", *times, ratio, *(binary_bytes(peaks.get(n)) for n in ("fused", "plain")))
    return table


def skipped_lines(entries: Sequence[Row]) -> list[str]:
    """A line per variant and reason, with the masks and lengths for which it was skipped."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        places.setdefault((entry["variant"], entry["reason"]), []).append(f"{entry['mask']} {entry['seq_len']:,}")
    return [f"skipped {variant} ({', '.join(where)}): {reason}" for (variant, reason), where in places.items()]


def _environment_line(document: Mapping[str, Any]) -> str:
    facts = document["environment"]
    keys = ("device", "cores", "load", "torch", "date")
    return ", ".join(f"{key} {facts[key]}" for key in keys if key in facts)
