"""Records of runs as a table, Markdown or CSV. Pure: records in, text or a rich table out."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH, binary_bytes, clean, count, flops_per_s, percent, plain, seconds

Record = Mapping[str, Any]
_CELL_PADDING = 3  # one blank on each side and the rule
_CSV_FIRST = ("run_id", "exp", "status", "path")


@dataclass(frozen=True)
class Column:
    """One figure of a report: its heading and how it reads in a record."""

    heading: str
    cell: Callable[[Record], str]
    number: bool = True


def _number(name: str, show: Callable[[float | None], str]) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record.get(name)
        return show(value) if isinstance(value, int | float) and not isinstance(value, bool) else DASH

    return cell


def _median(name: str, show: Callable[[float | None], str]) -> Callable[[Record], str]:
    """The median, and the quartiles where the steps differ."""
    middle, low, high = (_number(f"{name}{suffix}", show) for suffix in ("", "_p25", "_p75"))

    def cell(record: Record) -> str:
        if record.get(name) is None or low(record) == DASH or low(record) == high(record):
            return middle(record)
        return f"{middle(record)} ({low(record)}…{high(record)})"

    return cell


def _text(name: str) -> Callable[[Record], str]:
    return lambda record: clean(str(record[name])) if record.get(name) is not None else DASH


def _status(record: Record) -> str:
    lost = record.get("alive") is False
    return f"{record['status']}, lost" if lost else str(record["status"])


def _traffic(record: Record) -> str:
    intra, inter = (_number(f"comm_{link}_bytes", binary_bytes)(record) for link in ("intra", "inter"))
    return f"{intra} / {inter}"


def _peak(record: Record) -> str:
    figure = _number("peak_flops_per_device", flops_per_s)(record)
    source = record.get("peak_flops_source")
    return figure if figure == DASH or not source else f"{figure}, {clean(str(source))}"


COLUMNS = (
    Column("run", lambda record: f"{record['exp']}/{record['run_id']}", number=False),
    Column("status", _status, number=False),
    Column("attention", _text("attention_preset"), number=False),
    Column("memory policy", _text("memory_policy"), number=False),
    Column("seq_len", _text("seq_len")),
    Column("ranks", _text("world_size")),
    Column("steps", _text("steps")),
    Column("tokens/s/device", _median("tokens_per_s_per_device", count)),
    Column("step time", _median("step_time_s", seconds)),
    Column("n", _number("step_time_s_n", lambda value: f"{value:.0f}")),
    Column("MFU (causal-aware)", _number("mfu", percent)),
    Column("MFU (full attention)", _number("mfu_full_attention", percent)),
    Column("HFU", _number("hfu", percent)),
    Column("peak memory", _number("peak_memory_bytes", binary_bytes)),
    Column("peak tensors", _number("peak_tensor_bytes", binary_bytes)),
    Column("predicted peak", _number("predicted_peak_bytes", binary_bytes)),
    Column("sent intra / inter node", _traffic),
    Column("train loss", _number("final_train_loss", plain)),
    Column("validation loss", _number("final_validation_loss", plain)),
    Column("bits/byte", _number("final_validation_bits_per_byte", plain)),
    Column("peak FLOP/s per device", _peak, number=False),
)
NOTES = (
    "tokens/s and step time: median (p25…p75) over the n optimizer steps after warm-up. Sent bytes: attention messages "
    "of the busiest rank in one step.",
    "MFU (causal-aware) counts the FLOPs that the mask leaves; MFU (full attention) counts the whole square, as most "
    "papers do; HFU adds what is recomputed.",
)


def report_table(records: Sequence[Record], width: int) -> RenderableType:
    """A table that fits `width` columns: a run per row when that fits, else a run per column, in several tables."""
    cells = [[column.cell(record) for column in COLUMNS] for record in records]
    widths = [max(len(text) for text in column) for column in zip(headings(), *cells, strict=True)]
    body = _rows(cells) if sum(widths) + _CELL_PADDING * len(widths) <= width else _columns(cells, width)
    return Group(body, *(Text(note, style="dim") for note in NOTES))


def report_markdown(records: Sequence[Record]) -> str:
    """A GitHub table with a run per row, and the notes below it."""
    lines = [_markdown_row(headings()), _markdown_row(["---:" if column.number else "---" for column in COLUMNS])]
    lines += [_markdown_row([column.cell(record).replace("|", "\\|") for column in COLUMNS]) for record in records]
    return "\n".join([*lines, "", *NOTES]) + "\n"


def report_csv(records: Sequence[Record]) -> str:
    """All figures unrounded, a column per key of the summaries; lists and tables in a cell are left out."""
    names = dict.fromkeys([*_CSV_FIRST, *(name for record in records for name in record)])
    kept = [name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)]
    text = io.StringIO()
    writer = csv.DictWriter(text, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def headings() -> list[str]:
    """The headings of all columns."""
    return [column.heading for column in COLUMNS]


def _rows(cells: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    for column in COLUMNS:
        table.add_column(column.heading, justify="right" if column.number else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(text) for text in row))
    return table


def _columns(cells: Sequence[Sequence[str]], width: int) -> Group:
    """Tables with the headings down the side and as many runs beside each other as fit."""
    label = max(map(len, headings())) + _CELL_PADDING + 1
    tables: list[Table] = []
    group: list[Sequence[str]] = []
    used = label
    for row in cells:
        wide = min(max(map(len, row)), max(20, width - label - _CELL_PADDING)) + _CELL_PADDING
        if group and used + wide > width:
            tables.append(_side_by_side(group))
            group, used = [], label
        group.append(row)
        used += wide
    return Group(*tables, _side_by_side(group))


def _side_by_side(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    table.add_column(COLUMNS[0].heading, no_wrap=True, style="bold")
    for row in rows:
        table.add_column(Text(row[0]), overflow="fold")
    for index, column in enumerate(COLUMNS[1:], start=1):
        table.add_row(column.heading, *(Text(row[index]) for row in rows))
    return table


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
