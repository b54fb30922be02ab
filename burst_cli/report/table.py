"""A report for terminals: a table per group that fits its width, and what else was asked for below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.evaluation_view import evaluation_view, is_evaluation
from burst_cli.report.columns import FIRST_KEYS, Column, filled, notes_for
from burst_cli.report.compare_text import comparison_rows, config_rows, sides_of, tests_of
from burst_cli.report.model import Report
from burst_cli.report.published import caveats_of
from burst_cli.report.text import PUBLISHED_HEADINGS, published_cells
from burst_cli.report.values import Record, run_name

_MOST_EVALUATIONS = 4
_CELL_PADDING = 3  # one blank on each side and the rule


def report_view(report: Report, width: int) -> RenderableType:
    """Everything of the report, at most `width` columns wide."""
    return Lines(*_parts(report, width))


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    if report.sweep is not None:
        yield Text(report.sweep.line, style="bold")
    for group in report.groups:
        if len(report.groups) > 1:
            yield Text(f"\n{group.title}", style="bold")
        columns = report.columns if report.are_columns_chosen else filled(report.columns, group.records)
        yield records_table(columns, group.records, width, may_choose=not report.are_columns_chosen)
        yield from _evaluations(group.records)
    for note in notes_for(report.records):
        yield Text(note, style="dim")
    if report.baseline is not None:
        words = f"speed, memory: against {report.baseline.name} at the same length, with the interval of the quartiles"
        yield Text(words, style="dim")
    yield from _comparison(report, width)
    if report.published:
        yield Text("\nPublished by others, not measured here", style="bold")
        yield _table(PUBLISHED_HEADINGS, [published_cells(row) for row in report.published])
        yield from (Text(f"{caveat}", style="dim") for caveat in caveats_of(report.published))
    if report.failed_gates:
        yield Text(f"{len(report.failed_gates)} of {len(report.verdicts)} gate checks failed", style="bold red")
    if report.verdicts and not report.failed_gates:
        yield Text(f"all {len(report.verdicts)} gate checks passed", style="green")


def _evaluations(records: Sequence[Record]) -> Iterator[RenderableType]:
    """The tables of the newest runs that only evaluated."""
    for record in [record for record in records if is_evaluation(record)][-_MOST_EVALUATIONS:]:
        yield Text(f"\n{run_name(record)}", style="bold")
        yield evaluation_view(record)
        yield Text()


def _comparison(report: Report, width: int) -> Iterator[RenderableType]:
    found = report.comparison
    if found is None:
        return
    sides = (f"{side} = {words}" for side, words in zip("AB", sides_of(found), strict=True))
    yield Text(f"\n{', '.join(sides)}", style="bold")
    headings, *rows = comparison_rows(found)
    yield _table(headings, rows)
    yield from (Text(line, style="dim") for line in tests_of(found))
    if found.config:
        headings, *rows = config_rows(found)
        yield _table(headings, rows)
    yield from (Text(f"warning: {warning}", style="yellow") for warning in found.warnings)


def records_table(
    columns: Sequence[Column], records: Sequence[Record], width: int, *, may_choose: bool = False
) -> RenderableType:
    """A run per row when that fits, else a run per column when one table holds all.

    What is left: with `may_choose` a run per row with the columns that matter most, else several tables of columns.
    """
    cells = {column.key: [column.cell(record) for record in records] for column in columns}
    wide = {c.key: max(len(text) for text in (c.heading, *cells[c.key])) + _CELL_PADDING for c in columns}
    headings = [column.heading for column in columns]
    rows = list(zip(*cells.values(), strict=True))
    if sum(wide.values()) + 1 <= width or len(columns) == 1:
        return _table(headings, rows, [column.number for column in columns])
    side_by_side = max(map(len, headings)) + _CELL_PADDING + 1 + sum(_column_width(row, width) for row in rows)
    if not may_choose or len(records) == 1 or side_by_side <= width:
        return _columns(headings, rows, width)
    # Headings word below word, and runs by their last digits, which every verb takes for them.
    if "run" in cells:
        cells["run"] = [f"{exp}/{run_id[-6:]}" for exp, _, run_id in (name.rpartition("/") for name in cells["run"])]
    words = {column.key: column.heading.split() for column in columns}
    wide = {key: max(map(len, (*words[key], *cells[key]))) + _CELL_PADDING for key in words}
    kept = _most_important(columns, wide, width)
    left_out = [column.heading for column in columns if column not in kept]
    rows = list(zip(*(cells[c.key] for c in kept), strict=True))
    table = _table(["\n".join(words[c.key]) for c in kept], rows, [c.number for c in kept])
    return Lines(
        table, Text(f"Too narrow for: {', '.join(left_out)}. See --columns, --format html or md.", style="dim")
    )


def _most_important(columns: Sequence[Column], wide: Mapping[str, int], width: int) -> list[Column]:
    """As many columns as fit, chosen by FIRST_KEYS, in their own order; at least the first."""
    kept: list[str] = []
    used = 1
    for key in sorted(wide, key=lambda key: FIRST_KEYS.index(key) if key in FIRST_KEYS else len(FIRST_KEYS)):
        if not kept or used + wide[key] <= width:
            kept.append(key)
            used += wide[key]
    return [column for column in columns if column.key in kept]


def _table(headings: Sequence[str], cells: Sequence[Sequence[str]], numbers: Sequence[bool] = ()) -> Table:
    """Without `numbers` it may wrap."""
    table = Table(header_style="bold", padding=(0, 1))
    for index, heading in enumerate(headings):
        is_number = bool(numbers) and numbers[index]
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=bool(numbers), overflow="fold")
    for row in cells:
        table.add_row(*(Text(text) for text in row))
    return table


def _columns(headings: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Lines:
    """Tables with the headings down the side and as many runs beside each other as fit."""
    label = max(map(len, headings)) + _CELL_PADDING + 1
    tables: list[Table] = []
    group: list[Sequence[str]] = []
    used = label
    for row in cells:
        wide = min(_column_width(row, width), max(20, width - label - _CELL_PADDING) + _CELL_PADDING)
        if group and used + wide > width:
            tables.append(_side_by_side(headings, group))
            group, used = [], label
        group.append(row)
        used += wide
    return Lines(*tables, _side_by_side(headings, group))


def _column_width(row: Sequence[str], width: int) -> int:
    return min(max(map(len, row)), width) + _CELL_PADDING


def _side_by_side(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    table.add_column(headings[0], no_wrap=True, style="bold")
    for row in rows:
        table.add_column(Text(row[0]), overflow="fold")
    for index, heading in enumerate(headings[1:], start=1):
        table.add_row(heading, *(Text(row[index]) for row in rows))
    return table
