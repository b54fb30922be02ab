"""A report as one HTML file: plots inline as SVG, colours by prefers-color-scheme, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from burst_cli import __version__
from burst_cli.evaluation_view import evaluation_tables, is_evaluation, weights_text
from burst_cli.report.columns import BY_KEY, PROVENANCE_KEYS, Column, filled, notes_for
from burst_cli.report.compare_text import comparison_rows, config_rows, sides_of, tests_of
from burst_cli.report.curves import comparison_panel, run_panels
from burst_cli.report.draw import METHOD_COLOURS, has_matplotlib, marker
from burst_cli.report.markup import Markup, join, tag
from burst_cli.report.matrix import Matrix, method_matrix
from burst_cli.report.model import Report
from burst_cli.report.needles import needle_panel
from burst_cli.report.panels import Panel, group_panels, style_numbers
from burst_cli.report.published import caveats_of
from burst_cli.report.select import Group
from burst_cli.report.text import PUBLISHED_HEADINGS, published_cells
from burst_cli.report.values import Record, count_of, run_name, shortened, text
from engine.runs import STATES

GENERATOR = "burst report"
MOST_PANELS = 30  # a page with more is neither read nor quick
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_NO_PLOTS = "There are no plots, because matplotlib is not installed: pip install 'burst-train[picture]'"
_STATUSES = frozenset({*STATES, "unreadable", "lost", "illegal"})
_WIDE_CELLS = frozenset({"command", "versions", "peak_flops_per_device"})


@dataclass(frozen=True)
class Page:
    """The text of the file, and how many pictures are in it."""

    html: str
    panels: int


def report_page(report: Report, now: datetime | None = None) -> Page:
    """The page of `report`. Reads metrics.jsonl of the runs whose curves are shown."""
    plots = _Plots(report)
    groups = [_group(report, index, group, plots) for index, group in enumerate(report.groups)]
    body = [
        _head(report, now or datetime.now(UTC)),
        *_problems(report),
        *_comparison(report, plots),
        *(_contents(report.groups) if len(report.groups) > 1 else ()),
        *groups,
        *_published(report),
        tag("section", tag("h2", "How to read this"), *(tag("p", note) for note in notes_for(report.records)), *_how()),
    ]
    if plots.note:
        body.insert(1, tag("p", plots.note, class_="warning"))
    style = (resources.files("burst_cli.report") / "page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", name="color-scheme", content="light dark"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", _title(report)),
        tag("style", Markup(style)),
    )
    page = tag("html", head, tag("body", tag("main", *body)), lang="en")
    return Page(f"<!DOCTYPE html>\n{page}\n", plots.drawn)


class _Plots:
    """Draws the panels of a page, as many as a page may have, each with ids of its own."""

    def __init__(self, report: Report) -> None:
        self.styles = style_numbers(report.records)
        self.drawn = 0
        self.left_out = 0
        self._can_draw = has_matplotlib()

    @property
    def note(self) -> str | None:
        """What a reader must know about pictures that are not there."""
        if not self._can_draw:
            return _NO_PLOTS
        if self.left_out:
            return f"{self.left_out} plots beyond the first {MOST_PANELS} are left out; name fewer runs to see them"
        return None

    def figures(self, panels: Iterable[Panel]) -> Iterator[Markup]:
        if not self._can_draw:
            return
        from burst_cli.report.svg import panel_svg

        for panel in panels:
            if self.drawn >= MOST_PANELS:
                self.left_out += 1
                continue
            self.drawn += 1
            note = tag("p", panel.note, class_="note") if panel.note else None
            picture = panel_svg(panel, f"p{self.drawn}-")
            yield tag("figure", tag("figcaption", panel.title), picture, _legend(panel), note)

    @property
    def is_full(self) -> bool:
        """Whether no further picture will be drawn, so that nothing need be read for one."""
        return not self._can_draw or self.drawn >= MOST_PANELS


def _legend(panel: Panel) -> Markup | None:
    from burst_cli.report.svg import legend_mark

    if not panel.needs_legend:
        return None
    items = [
        tag(
            "li",
            legend_mark(
                marker(line.style),
                line.style % len(METHOD_COLOURS),
                hollow=line.is_published,
                dashed=line.is_published or line.is_dashed,
            ),
            tag("span", line.name),
        )
        for line in panel.lines
    ]
    return tag("ul", *items, class_="legend")


def _title(report: Report) -> str:
    names = list(dict.fromkeys(group.exp for group in report.groups))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"burst report: {shown or 'no runs'}"


def _head(report: Report, now: datetime) -> Markup:
    counts: dict[str, int] = {}
    for record in report.records:
        status = "lost" if record.get("alive") is False else text(record, "status") or "?"
        counts[status] = counts.get(status, 0) + 1
    chips = [tag("span", f"{number} {status}", class_=f"chip {_class(status)}") for status, number in counts.items()]
    line = f"{count_of('run', len(report.runs))} in {report.runs_dir}, {now:%Y-%m-%d %H:%M} UTC"
    sweep = tag("p", report.sweep.line, class_="facts") if report.sweep is not None else None
    return tag("header", tag("h1", _title(report)), tag("p", line, class_="facts"), tag("p", *chips), sweep)


def _class(status: str) -> str:
    """The class of a status: one of ours, never what a file says."""
    return status if status in _STATUSES else "missing"


def _problems(report: Report) -> Iterator[Markup]:
    if report.failed_gates:
        lines = [tag("li", line) for line in shortened([verdict.line for verdict in report.failed_gates])]
        title = f"{len(report.failed_gates)} of {len(report.verdicts)} gate checks failed"
        yield tag("section", tag("h2", title), tag("ul", *lines), class_="bad")
    elif report.verdicts:
        yield tag("p", f"All {len(report.verdicts)} gate checks passed.", class_="good")
    if report.warnings:
        lines = [tag("li", warning) for warning in report.warnings]
        yield tag("details", tag("summary", count_of("warning", len(lines))), tag("ul", *lines), class_="warning")


def _contents(groups: Sequence[Group]) -> Iterator[Markup]:
    links = [
        tag("li", tag("a", group.title, href=f"#g{index}"), f" ({len(group.records)})")
        for index, group in enumerate(groups)
    ]
    yield tag("nav", tag("ul", *links))


def _group(report: Report, index: int, group: Group, plots: _Plots) -> Markup:
    panels = group_panels(group, plots.styles, report.published)
    needles = needle_panel(group.records)
    panels += [needles] if needles is not None else []
    figures = [*plots.figures(panels), *(() if plots.is_full else plots.figures(run_panels(group)))]
    matrix = method_matrix(group)
    return tag(
        "section",
        tag("h2", group.title),
        _matrix(matrix) if matrix is not None else None,
        tag("div", *figures, class_="figures") if figures else None,
        _records(filled(report.columns, group.records), group.records),
        *_evaluations(group.records),
        _provenance(group.records),
        id=f"g{index}",
    )


def _matrix(matrix: Matrix) -> Markup:
    headings = tag("tr", tag("th", "tokens"), *(tag("th", method) for method in matrix.methods))
    rows = [
        tag(
            "tr",
            tag("th", length),
            *(
                tag(
                    "td",
                    tag("strong" if cell.best else "span", cell.figure),
                    tag("small", cell.details) if cell.details else None,
                    class_=_class(cell.status),
                )
                for cell in cells
            ),
        )
        for length, cells in matrix.rows
    ]
    words = "tokens/s per device, MFU (causal-aware), peak memory; bold: fastest at its length, if 5 steps say so"
    table = tag("table", tag("thead", headings), tag("tbody", *rows), class_="matrix")
    return join([tag("p", words, class_="facts"), _scrolling(table)])


def _records(columns: Sequence[Column], records: Sequence[Record]) -> Markup:
    headings = [
        tag("th", column.heading, class_="n" if column.number else None, title=column.doc or None) for column in columns
    ]
    rows = [tag("tr", *(_cell(column, record) for column in columns)) for record in records]
    return _scrolling(tag("table", tag("thead", tag("tr", *headings)), tag("tbody", *rows), class_="runs"))


def _evaluations(records: Sequence[Record]) -> Iterator[Markup]:
    """Loss by position and needles by depth of every run that only evaluated."""
    for record in records:
        tables = evaluation_tables(record) if is_evaluation(record) else []
        if tables:
            title = f"{run_name(record)}: {weights_text(record)}"
            yield tag("details", tag("summary", title), *map(_plain_table, tables))


def _cell(column: Column, record: Record) -> Markup:
    shown = column.cell(record)
    if column.key == "status":
        status = "lost" if record.get("alive") is False else text(record, "status") or "?"
        failure = text(record, "failure_text")
        return tag("td", tag("span", shown, class_=f"chip {_class(status)}", title=failure))
    kinds = [name for name, is_so in (("n", column.number), ("w", column.key in _WIDE_CELLS)) if is_so]
    return tag("th" if column.key == "run" else "td", shown, class_=" ".join(kinds) or None)


def _provenance(records: Sequence[Record]) -> Markup:
    columns = filled([BY_KEY[key] for key in PROVENANCE_KEYS], records)
    return tag("details", tag("summary", "Where these runs come from"), _records(columns, records))


def _comparison(report: Report, plots: _Plots) -> Iterator[Markup]:
    found = report.comparison
    if found is None:
        return
    panel = comparison_panel(found)
    sides = [tag("p", tag("b", side), f" = {words}") for side, words in zip("AB", sides_of(found), strict=True)]
    settings = tag(
        "details",
        tag("summary", f"{count_of('setting', len(found.config))} not the same"),
        _plain_table(config_rows(found)),
    )
    yield tag(
        "section",
        tag("h2", "A against B"),
        *sides,
        *(tag("p", warning, class_="warning") for warning in found.warnings),
        _plain_table(comparison_rows(found)),
        *(tag("p", line, class_="facts") for line in tests_of(found)),
        settings if found.config else None,
        tag("div", *plots.figures([panel]), class_="figures") if panel is not None else None,
        id="compare",
    )


def _published(report: Report) -> Iterator[Markup]:
    if not report.published:
        return
    rows = [PUBLISHED_HEADINGS, *map(published_cells, report.published)]
    yield tag(
        "section",
        tag("h2", "Published by others, not measured here"),
        _plain_table(rows),
        tag("ul", *(tag("li", caveat) for caveat in caveats_of(report.published))),
        id="published",
    )


def _plain_table(rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", heading) for heading in rows[0])))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows[1:]))
    return _scrolling(tag("table", head, body))


def _scrolling(table: Markup) -> Markup:
    return tag("div", table, class_="scroll", tabindex="0")


def _how() -> Iterator[Markup]:
    yield tag(
        "p",
        "In plots, bars are the quartiles of the steps; of several runs at one length the widest, around the middle "
        "run. A cross marks a length at which a method ran out of memory. Hollow marks on dashed lines were published "
        "by others.",
    )
