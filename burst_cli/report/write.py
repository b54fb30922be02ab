"""A report written: for terminals, as Markdown, CSV, LaTeX or an HTML page, and into files."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from burst_cli import __version__
from burst_cli.eval.view import evaluation_lines, evaluation_tables, is_evaluation
from burst_cli.figures import count_of
from burst_cli.outputs import has_matplotlib
from burst_cli.render import PIPE_WIDTH, json_document, told
from burst_cli.report.build import Report
from burst_cli.report.columns import BY_KEY, PAPER_KEYS, PROVENANCE_KEYS, Column, filled, notes_for
from burst_cli.report.draw import panel_link
from burst_cli.report.panels import (
    Panel,
    comparison_panels,
    group_panels,
    needle_tables,
    run_panels,
    style_numbers,
)
from burst_cli.report.records import Record, first_of, run_name, status_of
from burst_cli.tables import fitting, listing
from cluster.remote_text import one_line
from engine.config.errors import ConfigError
from engine.runs.folder import list_runs

MOST_PANELS = 30  # a page with more is neither read nor quick
_MOST_EVALUATIONS = 4
_CELL_PADDING = 3  # one blank on each side and the rule
_NO_PLOTS = "There are no plots, because matplotlib is not installed: pip install 'burst-train[picture]'"
_RUN_ID = re.compile(r"(?<=/)\d{8}-\d{6}-([0-9a-f]{6})$")  # of which its last digits are enough
_FORMULA = frozenset("=+-@\t\r")
_CSV_FIRST = ("run_id", "exp", "status", "path")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "×": r"$\times$",
    "…": r"\ldots{}",
    "–": "--",
    "·": r"$\cdot$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
}
_SIGNS = (  # of earlier reports, near their beginning
    b'name="generator" content="burst report',
    b"% burst report",
    b'{\n  "runs": [',
    ",".join(_CSV_FIRST).encode(),
)
_TEXT_SIGNS = ("tokens/s and step time: median (p25", "MFU (causal-aware) counts")  # the notes of tables and Markdown


# --- terminals --------------------------------------------------------------------------------------------------------


def report_view(report: Report, width: int) -> RenderableType:
    """Everything of the report, at most `width` columns wide: a table per group, and what else was asked for."""
    if report.records or report.comparison or report.sweep:
        return Lines(*_lines(report, width))
    where = report.runs_dir.absolute()
    if list_runs(report.runs_dir):
        return Text(f"No run in {where} passes these filters.", no_wrap=True, overflow="ignore")
    return Text(f"No runs in {where}. Start one with `burst launch exp=tiny`.", no_wrap=True, overflow="ignore")


def print_warnings(report: Report, console: Console) -> None:
    """Name what is damaged, lost or failed."""
    for warning in first_of(report.warnings):
        console.print(told("warning", warning), soft_wrap=True)
    for line in first_of([verdict.line for verdict in report.failed_gates]):
        console.print(Text.assemble(("failed: ", "bold red"), line), soft_wrap=True)


def written(report: Report, form: str) -> tuple[str, str]:
    """(the report as a file of this format, what is in it)."""
    runs = count_of("run", len(report.runs))
    if form == "html":
        page, plots = report_page(report)
        return page, f"{runs}, {count_of('plot', plots)}"
    writers: dict[str, Callable[[Report], str]] = {
        "md": report_markdown,
        "csv": lambda report: report_csv(report.runs),
        "latex": report_latex,
        "json": lambda report: json_document(report.to_dict()),
        "table": report_text,
    }
    return writers[form](report), runs


def report_text(report: Report) -> str:
    """The same as a file: as wide as it likes."""
    stream = io.StringIO()
    Console(file=stream, width=PIPE_WIDTH, highlight=False, emoji=False).print(report_view(report, PIPE_WIDTH))
    return stream.getvalue()


# --- what a report consists of, however it is written -----------------------------------------------------------------


class Grid(NamedTuple):
    """A table. numbers: which columns stand right; ranks: of the columns where not all have room, none: all stay."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[bool] = ()
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


def _grid(columns: Sequence[Column], records: Sequence[Record], *, may_choose: bool = False) -> Grid:
    """A run per row."""
    rows = [[column.cell(record) for column in columns] for record in records]
    ranks = [column.rank for column in columns] if may_choose else []
    return Grid([column.heading for column in columns], rows, [column.number for column in columns], ranks)


def parts_of(report: Report, *, is_page: bool = False) -> Iterator[Part]:
    """Everything of a report in the order in which it is read; a page has panels, and where runs come from."""
    if report.sweep:
        yield Part(report.sweep_line)
    styles = style_numbers(report.records)
    for group in report.groups:
        grids = [_grid(report.columns_of(group.records), group.records, may_choose=not report.are_columns_chosen)]
        grids += [Grid(rows[0], rows[1:], [True] * len(rows[0])) for rows in needle_tables(group.by_age)]
        panels = itertools.chain(group_panels(group.records, styles), run_panels(group.by_age)) if is_page else ()
        yield Part(group.title if is_page or len(report.groups) > 1 else "", grids, panels=panels)
        for record in [record for record in group.records if is_evaluation(record)][-_MOST_EVALUATIONS:]:
            grids = [Grid(rows[0], rows[1:], [True] * len(rows[0])) for rows in evaluation_tables(record)]
            yield Part(run_name(record), grids, evaluation_lines(record), is_aside=True)
        if is_page:
            provenance = filled([BY_KEY[key] for key in PROVENANCE_KEYS], group.records)
            yield Part("Where these runs come from", [_grid(provenance, group.records)], is_aside=True)
    if (found := report.comparison) is not None:
        tables = [found.rows, *([found.config_rows] if found.config_rows else [])]
        grids = [Grid(rows[0], rows[1:]) for rows in tables]
        sides = f"A = {found.sides[0]}, B = {found.sides[1]}"
        yield Part(sides, grids, found.tests, found.warnings, comparison_panels(found) if is_page else ())
    notes = list(notes_for(report.records))
    if report.baseline is not None:
        against = f"against {report.baseline.name} at the same length, with the interval of the quartiles"
        notes.append(f"speed, memory: {against}")
    yield Part("How to read this", notes=notes)


def _shown(grid: Grid, width: int) -> RenderableType:
    """A run per row when that fits, with ranks at least with the columns that matter most.

    A single run, and what may leave out nothing, is a table of headings and figures per run.
    """
    columns = [[heading, *cells] for heading, *cells in zip(grid.headings, *grid.rows, strict=True)]
    wide = sum(max(map(len, column)) + _CELL_PADDING for column in columns)
    if wide + 1 <= width or len(columns) == 1 or not grid.numbers:
        return _ruled(grid)
    if not grid.ranks or len(grid.rows) == 1:
        (name, *headings), runs = grid.headings, grid.rows
        return Lines(*(_ruled(Grid((name, run), list(zip(headings, cells, strict=True)))) for run, *cells in runs))
    # Headings word below word, and runs by their last digits, which every verb takes for them.
    headings = ["\n".join(re.split(r" |(?<=-)", heading)) for heading in grid.headings]
    columns = [[re.sub(_RUN_ID, r"\1", cell) for cell in column[1:]] for column in columns]
    pairs = zip(headings, columns, strict=True)
    widths = [max(map(len, (*heading.split("\n"), *cells))) + _CELL_PADDING for heading, cells in pairs]
    kept = fitting(grid.ranks, widths, width - 1)
    rows = list(zip(*(columns[place] for place in kept), strict=True))
    table = _ruled(Grid([headings[place] for place in kept], rows, [grid.numbers[place] for place in kept]))
    left_out = ", ".join(heading for place, heading in enumerate(grid.headings) if place not in kept)
    note = f"Too narrow for: {left_out}. See --columns, --format html or md." if left_out else ""
    return Lines(table, Text(note, style="dim"))


def _ruled(grid: Grid) -> Table:
    numbers = [heading for heading, is_number in zip(grid.headings, grid.numbers, strict=False) if is_number]
    return listing(grid.headings, grid.rows, numbers, ruled=True)


def _lines(report: Report, width: int) -> Iterator[RenderableType]:
    for part in parts_of(report):
        yield from [Text(f"\n{part.title}", style="bold")] if part.title else []
        yield from (_shown(grid, width) for grid in part.grids)
        yield from (Text(line, style="dim") for line in part.notes)
        yield from (Text(f"warning: {warning}", style="yellow") for warning in part.warnings)
    if report.failed_gates:
        yield Text(f"{len(report.failed_gates)} of {len(report.verdicts)} gate checks failed", style="bold red")
    elif report.verdicts:
        yield Text(f"all {len(report.verdicts)} gate checks passed", style="green")


# --- Markdown, CSV, LaTeX ---------------------------------------------------------------------------------------------


def report_markdown(report: Report) -> str:
    """GitHub tables: one per group with a run per row, then what else was asked for, and the notes."""
    blocks: list[str] = []
    for part in parts_of(report):
        blocks += [f"### {_plain(part.title)}"] if part.title else []
        blocks += [*map(_markdown, part.grids), "\n".join(map(_plain, part.notes))]
        blocks += [f"**Warning:** {_plain(warning)}" for warning in part.warnings]
    blocks += [f"**Gate failed:** {_plain(verdict.line)}" for verdict in report.failed_gates]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _markdown(grid: Grid) -> str:
    numbers = grid.numbers or [False] * len(grid.headings)
    rule = ["---:" if is_number else "---" for is_number in numbers]
    return "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in [grid.headings, rule, *grid.rows])


def _plain(text: str) -> str:
    """`text` in a cell of a GitHub table: no bar ends the cell, no tag begins."""
    return text.replace("|", "\\|").replace("<", "&lt;")


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


def report_latex(report: Report) -> str:
    """A booktabs table per group, notes as comments; unless columns were chosen, those that fit on a page of paper."""
    parts = ["% burst report; needs \\usepackage{booktabs}", *(f"% {line}" for line in notes_for(report.records))]
    for group in report.groups:
        columns = report.columns_of(group.records)
        grid = _grid([c for c in columns if report.are_columns_chosen or c.key in PAPER_KEYS], group.records)
        headings, *lines = (f"{' & '.join(map(_latex, row))} \\\\" for row in [grid.headings, *grid.rows])
        kinds = "".join("r" if is_number else "l" for is_number in grid.numbers)
        parts += [f"% {_plain(group.title)}", f"\\begin{{tabular}}{{{kinds}}}", "\\toprule", headings, "\\midrule"]
        parts += [*lines, "\\bottomrule", "\\end{tabular}"]
    return "\n".join(parts) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


# --- the page ---------------------------------------------------------------------------------------------------------


class _Plots:
    """Draws the panels of a page, as many as a page may have."""

    def __init__(self) -> None:
        self.drawn = 0
        self.most = MOST_PANELS if has_matplotlib() else 0

    @property
    def note(self) -> str | None:
        """What a reader must know about pictures that are not there."""
        words = f"No more than {self.most} plots are drawn; name fewer runs to see others"
        return _NO_PLOTS if not self.most else words if self.drawn == self.most else None

    def figures(self, panels: Iterable[Panel]) -> Iterator[tuple[Panel, str]]:
        """Each panel with its picture; for a page that is full nothing more is read."""
        for panel in itertools.islice(panels, self.most - self.drawn):
            self.drawn += 1
            yield panel, panel_link(panel)


def report_page(report: Report) -> tuple[str, int]:
    """(one HTML file, how many plots are in it). Reads metrics.jsonl of the runs whose curves are shown.

    Everything is inline; there is no script and nothing is fetched.
    """
    import jinja2

    plots = _Plots()
    names = list(dict.fromkeys(group.exp for group in report.groups))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["count_of"], environment.filters["first_of"] = count_of, first_of
    template = (resources.files("burst_cli.report") / "page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        report=report,
        version=__version__,
        now=datetime.now(UTC),
        title=f"burst report: {shown or 'no runs'}",
        counts=Counter(map(status_of, report.records)),
        parts=[(part, list(plots.figures(part.panels))) for part in parts_of(report, is_page=True)],
        plots_note=plots.note,
    )
    return page, plots.drawn


def check_is_ours(path: Path | None) -> None:
    """Raise ConfigError for a file that an earlier report did not write; an empty one may be replaced as well."""
    if path is not None and path.is_file() and not _is_ours(path.read_bytes(), path.suffix):
        raise ConfigError(f"--output: {path} exists and is no report that burst wrote; give another name, or remove it")


def _is_ours(content: bytes, suffix: str) -> bool:
    text = content.decode("utf-8", "replace") if suffix in (".md", ".txt") else ""
    return not content or any(sign in content[:4096] for sign in _SIGNS) or any(sign in text for sign in _TEXT_SIGNS)
