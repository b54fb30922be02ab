"""A report written: for terminals, as CSV with every figure, and as an HTML page with plots."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from burst_cli import __version__
from burst_cli.outputs import has_matplotlib
from burst_cli.render import Column as TableColumn
from burst_cli.render import fitted_table, listing, say, told
from burst_cli.report import compare
from burst_cli.report.build import Report
from burst_cli.report.columns import COLUMNS, PROVENANCE, Column, filled, notes_for
from burst_cli.report.plots import (
    Panel,
    comparison_panels,
    drawing_notes,
    group_panels,
    panel_link,
    run_panels,
    style_numbers,
)
from burst_cli.report.records import Record, is_in_progress, run_name, status_of
from burst_cli.runs.evaluation import evaluation_lines, evaluation_tables
from burst_cli.runs.read import is_evaluation
from cluster.remote_text import one_line
from cluster.remote_text import text as text_of
from engine.config.errors import ConfigError
from engine.runs.figures import count_of

MOST_PANELS = 30  # a page with more is neither read nor quick
_MOST_EVALUATIONS = 4
_REFRESH_S = 30  # a page of a run in progress loads itself again: so `burst report` may be repeated meanwhile
_NO_PLOTS = "There are no plots, because matplotlib is not installed: pip install 'burst-train[picture]'"
_RUN_ID = re.compile(r"(?<=/)\d{8}-\d{6}-([0-9a-f]{6})$")  # of which its last digits are enough
_FORMULA = frozenset("=+-@\t\r")
_CSV_FIRST = ("run_id", "exp", "status", "path")
# Of earlier reports, near their beginning.
_SIGNS = (b'name="generator" content="burst report', ",".join(_CSV_FIRST).encode())


def print_warnings(report: Report, console: Console) -> None:
    """Name what is damaged or lost."""
    say(console, *(told("warning", warning) for warning in report.warnings))


def written(report: Report, ending: str) -> tuple[str, str]:
    """(the report as a file with this ending, what is in it)."""
    runs = count_of("run", len(report.runs))
    if ending == ".csv":
        return report_csv(report.runs), runs
    page, plots = report_page(report)
    return page, f"{runs}, {count_of('plot', plots)}"


def check_is_ours(path: Path) -> None:
    """Raise ConfigError for a file that an earlier report did not write; an empty one may be replaced as well."""
    content = path.read_bytes() if path.is_file() else b""
    if content and not any(sign in content[:4096] for sign in _SIGNS):
        raise ConfigError(f"--output: {path} exists and is no report that burst wrote; give another name, or remove it")


# --- what a report consists of, however it is written -----------------------------------------------------------------


class Grid(NamedTuple):
    """A table. numbers: headings whose columns stand right; ranks: of columns that may have no room, none: all stay."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str]
    ranks: Sequence[int] = ()


class Part(NamedTuple):
    """A stretch of a report; below its tables what must be read beside them.

    panels: what a page draws above them. is_aside: folded on a page.
    """

    title: str = ""
    grids: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    panels: Iterable[Panel] = ()
    is_aside: bool = False


def _runs_grid(columns: Sequence[Column], records: Sequence[Record]) -> Grid:
    """A run per row, with the columns that any of them fills."""
    chosen = filled(columns, records)
    rows = [[column.cell(record) for column in chosen] for record in records]
    numbers = {column.heading for column in chosen if column.show is not None}
    return Grid([column.heading for column in chosen], rows, numbers, [column.rank for column in chosen])


def parts_of(report: Report, *, is_page: bool = False) -> Iterator[Part]:
    """Everything of a report in the order in which it is read; a page has panels, and where runs come from."""
    if report.sweep:
        yield Part(report.sweep_line)
    styles = style_numbers(report.groups)
    for title, records in report.groups:
        panels = itertools.chain(group_panels(records, styles), run_panels(records))
        notes = drawing_notes(records) if is_page else ()
        yield Part(title, [_runs_grid(COLUMNS, records)], notes, panels=panels)
        for record in [record for record in records if is_evaluation(record)][-_MOST_EVALUATIONS:]:
            grids = [Grid(headings, rows, headings) for headings, *rows in evaluation_tables(record)]
            yield Part(run_name(record), grids, evaluation_lines(record), is_aside=True)
        if is_page:
            yield Part("Where these runs come from", [_runs_grid(PROVENANCE, records)], is_aside=True)
    if (found := report.comparison) is not None:
        grid = Grid(compare.HEADINGS, [one.cells for one in found.differences], ())
        sides = f"A = {run_name(found.a)}, B = {run_name(found.b)}"
        yield Part(sides, [grid], compare.NOTES, found.warnings, comparison_panels(found))
    yield Part("How to read this", notes=notes_for(report.records))


# --- terminals --------------------------------------------------------------------------------------------------------


def report_view(report: Report, width: int) -> RenderableType:
    """Everything of the report, at most `width` columns wide: a table per group, and what else was asked for."""
    if not report.records and not report.sweep:
        text = f"No runs in {report.runs_dir.absolute()}. Start one with `burst launch exp=tiny`."
        return Text(text, no_wrap=True, overflow="ignore")
    lines: list[RenderableType] = []
    for part in parts_of(report):
        lines += [Text(f"\n{part.title}", style="bold")] if part.title else []
        lines += [_shown(grid, width) for grid in part.grids]
        lines += [Text(line, style="dim") for line in part.notes]
        lines += [Text(f"warning: {warning}", style="yellow") for warning in part.warnings]
    return Group(*lines)


def _shown(grid: Grid, width: int) -> RenderableType:
    """A single run as a list of its figures; of several the columns that matter most, where not all have room."""
    if not grid.ranks:
        return listing(grid.headings, grid.rows, grid.numbers)
    if len(grid.rows) == 1:
        (name, *headings), (run, *cells) = grid.headings, grid.rows[0]
        return listing((name, run), list(zip(headings, cells, strict=True)))
    # Headings word below word, and runs by their last digits, which every verb takes for them.
    columns = [
        TableColumn("\n".join(re.split(r" |(?<=-)", heading)), rank, heading in grid.numbers)
        for heading, rank in zip(grid.headings, grid.ranks, strict=True)
    ]
    rows, notes = [list(map(Text, row)) for row in grid.rows], [Text()] * len(grid.rows)
    short = [_RUN_ID.sub(r"\1", row[0]) for row in grid.rows]
    table, is_whole = fitted_table(columns, rows, notes, width, short=short)
    more = "Where columns have no room: --output report.html has all, report.csv every figure."
    return table if is_whole else Group(table, Text(more, style="dim"))


# --- files ------------------------------------------------------------------------------------------------------------


def report_csv(records: Sequence[Record]) -> str:
    """All figures unrounded, a column per key of the summaries; lists and tables in a cell are left out."""
    names = dict.fromkeys([*_CSV_FIRST, *(name for record in records for name in record)])
    kept = [name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)]
    text = io.StringIO()
    writer = csv.DictWriter(text, kept, extrasaction="ignore", lineterminator="\n")
    writer.writerow({name: _inert(name) for name in kept})
    writer.writerows({name: _inert(record.get(name)) for name in kept} for record in records)
    return text.getvalue()


def _inert(value: object) -> object:
    """A text without what a terminal obeys, and an apostrophe before what a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    text = one_line(value, 4096)
    return f"'{text}" if text[:1] in _FORMULA else text


def report_page(report: Report) -> tuple[str, int]:
    """(one HTML file, how many plots are in it). Reads metrics.jsonl of the runs whose curves are shown.

    Everything is inline; there is no script and nothing is fetched.
    """
    import jinja2

    most, drawn = MOST_PANELS if has_matplotlib() else 0, 0
    parts = []
    for part in parts_of(report, is_page=True):
        # For a page that is full nothing more is read.
        figures = [(panel, panel_link(panel)) for panel in itertools.islice(part.panels, most - drawn)]
        drawn += len(figures)
        parts.append((part, figures))
    full = f"No more than {most} plots are drawn; name fewer runs to see others" if drawn == most else None
    names = list(dict.fromkeys(text_of(record, "exp") or "?" for record in report.records))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["count_of"] = count_of
    template = (resources.files("burst_cli.report") / "page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        report=report,
        version=__version__,
        now=datetime.now(UTC),
        title=f"burst report: {shown or 'no runs'}",
        counts=Counter(map(status_of, report.records)),
        parts=parts,
        refresh_s=_REFRESH_S if any(map(is_in_progress, report.records)) else None,
        plots_note=full if most else _NO_PLOTS,
    )
    return page, drawn
