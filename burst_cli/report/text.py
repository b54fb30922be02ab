"""A report as Markdown, CSV or LaTeX text. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from burst_cli.figures import DASH, count, percent
from burst_cli.report.columns import BASELINE_KEYS, Column, filled, notes_for
from burst_cli.report.compare_text import comparison_rows, config_rows, sides_of, tests_of
from burst_cli.report.model import Report
from burst_cli.report.published import Published, caveats_of
from burst_cli.report.values import Record

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
_PAPER = frozenset(
    {
        "attention_preset",
        "memory_policy",
        "seq_len",
        "tokens_per_s_per_device",
        "mfu",
        "mfu_full_attention",
        "peak_memory_bytes",
        "final_needle_accuracy",
        "final_needle_gain",
        *BASELINE_KEYS,
    }
)
PUBLISHED_HEADINGS = (
    "system",
    "method",
    "model",
    "hardware",
    "seq_len",
    "tokens/s/device",
    "MFU (causal-aware)",
    "peak (GB)",
    "figure",
    "source",
)


def published_cells(row: Published) -> tuple[str, ...]:
    """One published row under PUBLISHED_HEADINGS."""
    lost = row.status == "oom"
    return (
        row.system,
        row.method or DASH,
        row.model or DASH,
        f"{row.gpus} × {row.hardware}" if row.gpus else row.hardware,
        DASH if row.seq_len is None else f"{row.seq_len}",
        "OOM" if lost else count(row.tokens_per_s_per_device),
        percent(row.mfu),
        "OOM" if lost else DASH if row.peak_memory_gb is None else f"{row.peak_memory_gb:g}",
        DASH if row.metric is None else f"{row.metric}: {row.value}",
        row.source,
    )


def report_markdown(report: Report) -> str:
    """GitHub tables: one per group with a run per row, then what else was asked for, and the notes."""
    blocks: list[str] = [] if report.sweep is None else [_plain(report.sweep.line)]
    for group in report.groups:
        if len(report.groups) > 1:
            blocks.append(f"### {_plain(group.title)}")
        blocks.append(_markdown_records(report.columns, group.records))
    blocks.append("\n".join(notes_for(report.records)))
    found = report.comparison
    if found is not None:
        first, second = sides_of(found)
        blocks.append(f"### A = {_plain(first)}, B = {_plain(second)}")
        blocks.append(_markdown(comparison_rows(found)))
        blocks += ["\n".join(map(_plain, tests_of(found)))] if tests_of(found) else []
        blocks += [_markdown(config_rows(found))] if found.config else []
        blocks += [f"**Warning:** {_plain(warning)}" for warning in found.warnings]
    if report.published:
        blocks += ["### Published by others", _markdown([PUBLISHED_HEADINGS, *map(published_cells, report.published)])]
        blocks.append("\n".join(caveats_of(report.published)))
    blocks += [f"**Gate failed:** {_plain(verdict.line)}" for verdict in report.failed_gates]
    return "\n\n".join(blocks) + "\n"


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
        columns = filled([c for c in report.columns if report.are_columns_chosen or c.key in _PAPER], group.records)
        rows = [[_latex(column.cell(record)) for column in columns] for record in group.records]
        headings = " & ".join(_latex(column.heading) for column in columns)
        parts += [
            f"% {_plain(group.title)}",
            f"\\begin{{tabular}}{{{''.join('r' if column.number else 'l' for column in columns)}}}",
            "\\toprule",
            f"{headings} \\\\",
            "\\midrule",
            *(f"{' & '.join(row)} \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}",
        ]
    return "\n".join(parts) + "\n"


def _markdown_records(columns: Sequence[Column], records: Iterable[Record]) -> str:
    rows = [[column.cell(record) for column in columns] for record in records]
    numbers = [column.number for column in columns]
    return _markdown([[column.heading for column in columns], *rows], numbers)


def _markdown(rows: Sequence[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    rule = ["---:" if numbers and numbers[index] else "---" for index in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in [rows[0], rule, *rows[1:]])


def _plain(text: str) -> str:
    """`text` in a cell of a GitHub table: no bar ends the cell, no tag begins."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)
