"""A report written: for terminals, as Markdown, CSV, LaTeX or an HTML page, and into files."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from burst_cli import __version__
from burst_cli.eval.view import evaluation_tables, evaluation_view, is_evaluation, weights_text
from burst_cli.figures import count_of
from burst_cli.outputs import check_output, has_matplotlib
from burst_cli.render import PIPE_WIDTH, json_document
from burst_cli.report.against import caveats_of, published_table
from burst_cli.report.build import Group, Report
from burst_cli.report.columns import BY_KEY, PAPER_KEYS, PROVENANCE_KEYS, Column, filled, notes_for
from burst_cli.report.draw import panel_svg, report_png
from burst_cli.report.panels import (
    Panel,
    comparison_panels,
    group_panels,
    method_matrix,
    needle_panels,
    run_panels,
    style_numbers,
)
from burst_cli.report.records import Record, first_of, run_name, status_of
from burst_cli.tables import fitting
from engine.config.errors import ConfigError
from engine.runs.folder import STATES, list_runs

MOST_PANELS = 30  # a page with more is neither read nor quick
_MOST_EVALUATIONS = 4
_CELL_PADDING = 3  # one blank on each side and the rule
_NO_PLOTS = "There are no plots, because matplotlib is not installed: pip install 'burst-train[picture]'"
_STATUSES = frozenset({*STATES, "unreadable", "lost", "illegal"})
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
_SIGNS = (
    b'name="generator" content="burst report',
    b"burst report",  # the Software entry of a PNG, the first line of LaTeX
    b'{\n  "runs": [',
    b"run_id,exp,status,path",
)
_TEXT_SIGNS = ("tokens/s and step time: median (p25", "MFU (causal-aware) counts")  # the notes of tables and Markdown


# --- terminals --------------------------------------------------------------------------------------------------------


def report_view(report: Report, width: int) -> RenderableType:
    """Everything of the report, at most `width` columns wide: a table per group, and what else was asked for."""
    if report.records or report.comparison or report.published or report.sweep:
        return Lines(*_parts(report, width))
    where = report.runs_dir.absolute()
    if list_runs(report.runs_dir):
        return Text(f"No run in {where} passes these filters.", no_wrap=True, overflow="ignore")
    return Text(f"No runs in {where}. Start one with `burst launch exp=tiny`.", no_wrap=True, overflow="ignore")


def print_warnings(report: Report, console: Console) -> None:
    """Name what is damaged, lost or failed."""
    for warning in first_of(report.warnings):
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)
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


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    if report.sweep:
        yield Text(report.sweep_line, style="bold")
    for group in report.groups:
        if len(report.groups) > 1:
            yield Text(f"\n{group.title}", style="bold")
        columns = report.columns if report.are_columns_chosen else filled(report.columns, group.records)
        yield _records_table(columns, group.records, width, may_choose=not report.are_columns_chosen)
        for record in [record for record in group.records if is_evaluation(record)][-_MOST_EVALUATIONS:]:
            yield Lines(Text(f"\n{run_name(record)}", style="bold"), evaluation_view(record), Text())
    for note in notes_for(report.records):
        yield Text(note, style="dim")
    if report.baseline is not None:
        words = f"speed, memory: against {report.baseline.name} at the same length, with the interval of the quartiles"
        yield Text(words, style="dim")
    for part in _asked_for(report):
        yield Text(f"\n{part.title}", style="bold")
        yield from (_table(rows[0], rows[1:]) for rows in part.tables)
        yield from (Text(line, style="dim") for line in part.notes)
        yield from (Text(f"warning: {warning}", style="yellow") for warning in part.warnings)
    if report.failed_gates:
        yield Text(f"{len(report.failed_gates)} of {len(report.verdicts)} gate checks failed", style="bold red")
    elif report.verdicts:
        yield Text(f"all {len(report.verdicts)} gate checks passed", style="green")


class _Part(NamedTuple):
    """What was asked for beside runs: tables, headings first, and what must be read below them."""

    title: str
    tables: Sequence[Sequence[Sequence[str]]]
    notes: Sequence[str]
    warnings: Sequence[str] = ()


def _asked_for(report: Report) -> Iterator[_Part]:
    if (found := report.comparison) is not None:
        tables = [found.rows, *([found.config_rows] if found.config_rows else [])]
        yield _Part(f"A = {found.sides[0]}, B = {found.sides[1]}", tables, found.tests, found.warnings)
    if report.published:
        tables = [published_table(report.published)]
        yield _Part("Published by others, not measured here", tables, caveats_of(report.published))


def _records_table(
    columns: Sequence[Column], records: Sequence[Record], width: int, *, may_choose: bool
) -> RenderableType:
    """A run per row when that fits, with `may_choose` at least with the columns that matter most.

    A single run, and what may leave out nothing, is a table of headings and figures per run.
    """
    cells = {column.key: [column.cell(record) for record in records] for column in columns}
    wide = sum(max(len(text) for text in (c.heading, *cells[c.key])) + _CELL_PADDING for c in columns)
    headings = [column.heading for column in columns]
    rows = list(zip(*cells.values(), strict=True))
    if wide + 1 <= width or len(columns) == 1:
        return _table(headings, rows, [column.number for column in columns])
    if not may_choose or len(records) == 1:
        return Lines(*(_run_table(headings, row) for row in rows))
    # Headings word below word, and runs by their last digits, which every verb takes for them.
    if "run" in cells:
        cells["run"] = [f"{exp}/{run_id[-6:]}" for exp, _, run_id in (name.rpartition("/") for name in cells["run"])]
    words = {column.key: re.split(r" |(?<=-)", column.heading) for column in columns}
    widths = [max(map(len, (*words[column.key], *cells[column.key]))) + _CELL_PADDING for column in columns]
    kept = [columns[place] for place in fitting([column.rank for column in columns], widths, width - 1)]
    left_out = ", ".join(column.heading for column in columns if column not in kept)
    rows = list(zip(*(cells[column.key] for column in kept), strict=True))
    table = _table(["\n".join(words[column.key]) for column in kept], rows, [column.number for column in kept])
    return Lines(table, Text(f"Too narrow for: {left_out}. See --columns, --format html or md.", style="dim"))


def _table(headings: Sequence[str], cells: Iterable[Sequence[str]], numbers: Sequence[bool] = ()) -> Table:
    """Without `numbers` it may wrap."""
    table = Table(header_style="bold", padding=(0, 1))
    for index, heading in enumerate(headings):
        is_number = bool(numbers) and numbers[index]
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=bool(numbers), overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _run_table(headings: Sequence[str], cells: Sequence[str]) -> Table:
    """One run, its figures below each other."""
    table = Table(header_style="bold", padding=(0, 1))
    table.add_column(headings[0], no_wrap=True, style="bold")
    table.add_column(Text(cells[0]), overflow="fold")
    for heading, cell in zip(headings[1:], cells[1:], strict=True):
        table.add_row(heading, Text(cell))
    return table


# --- Markdown, CSV, LaTeX ---------------------------------------------------------------------------------------------


def report_markdown(report: Report) -> str:
    """GitHub tables: one per group with a run per row, then what else was asked for, and the notes."""
    blocks: list[str] = [] if not report.sweep else [_plain(report.sweep_line)]
    for group in report.groups:
        if len(report.groups) > 1:
            blocks.append(f"### {_plain(group.title)}")
        rows = [[column.cell(record) for column in report.columns] for record in group.records]
        headings = [column.heading for column in report.columns]
        blocks.append(_markdown([headings, *rows], [column.number for column in report.columns]))
    blocks.append("\n".join(notes_for(report.records)))
    for part in _asked_for(report):
        blocks += [f"### {_plain(part.title)}", *map(_markdown, part.tables), "\n".join(map(_plain, part.notes))]
        blocks += [f"**Warning:** {_plain(warning)}" for warning in part.warnings]
    blocks += [f"**Gate failed:** {_plain(verdict.line)}" for verdict in report.failed_gates]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _markdown(rows: Sequence[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    rule = ["---:" if numbers and numbers[index] else "---" for index in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in [rows[0], rule, *rows[1:]])


def _plain(text: str) -> str:
    """`text` in a cell of a GitHub table: no bar ends the cell, no tag begins."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def report_csv(records: Sequence[Record]) -> str:
    """All figures unrounded, a column per key of the summaries; lists and tables in a cell are left out."""
    names = dict.fromkeys([*_CSV_FIRST, *(name for record in records for name in record)])
    kept = [name for name in names if not any(isinstance(r.get(name), dict | list) for r in records)]
    text = io.StringIO()
    writer = csv.DictWriter(text, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(record.get(name)) for name in kept} for record in records)
    return text.getvalue()


def _inert(value: object) -> object:
    """A text that a spreadsheet would run as a formula gets an apostrophe before it; runs may hold foreign text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in _FORMULA else value


def report_latex(report: Report) -> str:
    """A booktabs table per group, notes as comments; unless columns were chosen, those that fit on a page of paper."""
    parts = ["% burst report; needs \\usepackage{booktabs}", *(f"% {line}" for line in notes_for(report.records))]
    for group in report.groups:
        columns = filled([c for c in report.columns if report.are_columns_chosen or c.key in PAPER_KEYS], group.records)
        rows = [
            [column.heading for column in columns],
            *([c.cell(record) for c in columns] for record in group.records),
        ]
        headings, *lines = (f"{' & '.join(map(_latex, row))} \\\\" for row in rows)
        kinds = "".join("r" if column.number else "l" for column in columns)
        parts += [f"% {_plain(group.title)}", f"\\begin{{tabular}}{{{kinds}}}", "\\toprule", headings, "\\midrule"]
        parts += [*lines, "\\bottomrule", "\\end{tabular}"]
    return "\n".join(parts) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


# --- the page and the picture -----------------------------------------------------------------------------------------


class _Plots:
    """Draws the panels of a page, as many as a page may have, each with ids of its own."""

    def __init__(self) -> None:
        self.drawn = self.left_out = 0
        self._most = MOST_PANELS if has_matplotlib() else 0

    @property
    def is_full(self) -> bool:
        """Whether no further picture will be drawn, so that nothing need be read for one."""
        return self.drawn >= self._most

    @property
    def note(self) -> str | None:
        """What a reader must know about pictures that are not there."""
        words = f"{self.left_out} plots beyond the first {MOST_PANELS} are left out; name fewer runs to see them"
        return _NO_PLOTS if not self._most else words if self.left_out else None

    def figures(self, panels: Iterable[Panel]) -> Iterator[tuple[Panel, str]]:
        """Each panel with its <svg>."""
        for panel in panels:
            if self.is_full:
                self.left_out += 1
            else:
                self.drawn += 1
                yield panel, panel_svg(panel, f"p{self.drawn}-")


def report_page(report: Report, now: datetime | None = None) -> tuple[str, int]:
    """(one HTML file, how many plots are in it). Reads metrics.jsonl of the runs whose curves are shown.

    Plots are inline, colours follow prefers-color-scheme; there is no script and nothing is fetched.
    """
    import jinja2

    plots, styles = _Plots(), style_numbers(report.records)
    names = list(dict.fromkeys(group.exp for group in report.groups))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    compared = list(plots.figures(comparison_panels(report.comparison)))
    groups = [_group(report, group, styles, plots) for group in report.groups]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"count_of": count_of, "status_of": status_of}
    environment.filters |= {
        "first_of": first_of,
        "status_class": lambda name: name if name in _STATUSES else "missing",
    }
    template = (resources.files("burst_cli.report") / "page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        report=report,
        version=__version__,
        now=now or datetime.now(UTC),
        title=f"burst report: {shown or 'no runs'}",
        counts=Counter(map(status_of, report.records)),
        groups=groups,
        comparison_figures=compared,
        published=published_table(report.published),
        caveats=caveats_of(report.published),
        plots_note=plots.note,
        notes=notes_for(report.records),
    )
    return page, plots.drawn


def _group(report: Report, group: Group, styles: Mapping[str, int], plots: _Plots) -> dict[str, object]:
    """What the page shows of a group."""
    panels = [*group_panels(group.names, group.records, styles, report.published), *needle_panels(group.records)]
    figures = [*plots.figures(panels), *(() if plots.is_full else plots.figures(run_panels(group.records)))]
    evaluations = [
        (f"{run_name(record)}: {weights_text(record)}", tables)
        for record in group.records
        if is_evaluation(record) and (tables := evaluation_tables(record))
    ]
    return {
        "title": group.title,
        "records": group.records,
        "matrix": method_matrix(group.records),
        "figures": figures,
        "columns": filled(report.columns, group.records),
        "evaluations": evaluations,
        "provenance": filled([BY_KEY[key] for key in PROVENANCE_KEYS], group.records),
    }


def report_picture(report: Report) -> bytes:
    """The plots as one PNG, a row of panels per group. Raises ConfigError when there is nothing to draw."""

    def rows() -> Iterator[tuple[str, list[Panel]]]:
        styles = style_numbers(report.records)
        yield "A against B", comparison_panels(report.comparison)
        for group in report.groups:
            panels = group_panels(group.names, group.records, styles, report.published)
            yield group.title, [*panels, *needle_panels(group.records), *run_panels(group.records)]

    return report_png(rows())


# --- files: nothing that is no report of ours is overwritten unasked --------------------------------------------------


def check_targets(output: Path | None, png: Path | None, *, force: bool) -> None:
    """Raise ConfigError, before runs are read, when a file cannot or must not be written."""
    check_output("--output", output)
    check_output("--png", png, ".png")
    for option, path in (("--output", output), ("--png", png)):
        if path is not None and path.exists() and not force and not _is_ours(path):
            words = "exists and is no report that burst wrote; give another name, or --force to replace it"
            raise ConfigError(f"{option}: {path} {words}")


def _is_ours(path: Path) -> bool:
    """Whether an earlier report lies there; an empty file may be replaced as well."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    text = content.decode("utf-8", "replace") if path.suffix in (".md", ".txt") else ""
    return not content or any(sign in content[:4096] for sign in _SIGNS) or any(sign in text for sign in _TEXT_SIGNS)
