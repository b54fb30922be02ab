"""The document as Markdown: hardware, goals, a table per part, published figures. A pure function of the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from benchmarks.gpu.plan import Row
from benchmarks.gpu.published import PUBLISHED
from benchmarks.gpu.tables import DASH, Column, columns_of, plain, table

LONGEST_ERROR = 240  # characters; the document has all of it
NOTES = {
    "tiles": "Backward FLOPs are counted as 2.5 times the forward's.",
    "blocked": "Shares of the speed of one kernel: of the same sequence (whole ring), or of a long one (one rank). "
    "Messages cost nothing here.",
    "loss": "The roofline is the time of the loss's three products at the measured matmul rate. Extra peak: beyond the "
    "inputs and the gradient of hidden.",
    "parity": "Relative differences from one rank, of losses and of the gradient that differs most.",
    "steps": "Conventions: `engine/predict/flops.py`. Memory policies: those that fit the whole model there.",
}


def markdown(document: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = _head(document)
    lines += ["## Goals", "", *_goals(document), ""]
    for part in document.get("parts", ()):
        lines += _part(part, columns_of(document))
    return "\n".join(lines).rstrip() + "\n"


def _head(document: Mapping[str, Any]) -> list[str]:
    facts = document["environment"]
    peak, matmul = document["peak"], document.get("matmul_flops_per_s")
    lines = [f"# {facts['device']}, {facts['date'][:10]}", ""]
    if document["size"] != "full" or document["device"] != "cuda":
        lines += ["**A dry run: sizes and device are not those that the goals are about.**", ""]
    if not document.get("complete"):
        lines += ["**Not complete: the session was still running, or was ended, when this was written.**", ""]
    lines += [f"**{_cell(warning)}**\n" for warning in document.get("warnings", ())]
    lines += ["```sh", document["command"], "```", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    lines.append(f"| peak | {_tflops(peak['flops_per_s'])} ({peak['source']}) |")
    lines.append(f"| measured matmul, bf16 | {_tflops(matmul)} |")
    lines.append(f"| session | {document.get('seconds', 0):.0f} of {document['budget_s']:.0f} s |")
    return [*lines, ""]


def _goals(document: Mapping[str, Any]) -> list[str]:
    lines = ["| goal | | measured |", "|---|---|---|"]
    lines += [f"| {v['target']} | {v['verdict']} | {v['measured']} |" for v in document.get("targets", ())]
    return lines


def _part(part: Mapping[str, Any], columns: Mapping[str, Sequence[Column]]) -> list[str]:
    name, rows = part["name"], part["rows"]
    lines = [
        f"## {part['title']}",
        "",
        f"{part['status']}, {part.get('seconds', 0):.0f} s. {NOTES.get(name, '')}".rstrip(),
        "",
    ]
    measured = [row for row in rows if row["status"] == "measured"]
    for rows_of_table in _tables(measured):
        lines += [*table(columns.get(name) or _all_columns(rows_of_table), rows_of_table), ""]
    derived = [row for row in part.get("derived", ()) if row["status"] == "measured"]
    if derived:
        lines += [*table(columns["derived"], derived), ""]
    if name == "tiles":
        lines += _published()
    others = [row for row in (*rows, *part.get("derived", ())) if row["status"] != "measured"]
    alike: dict[tuple[str, str], list[str]] = {}
    for row in others:
        if "needed_s" not in row:
            alike.setdefault((row["status"], shorten(_cell(row["error"]), LONGEST_ERROR)), []).append(row["label"])
    lines += [f"- {status}: {'; '.join(labels)}: {error}" for (status, error), labels in alike.items()]
    late = [f"{row['label']} ({row['needed_s']:.0f} s)" for row in others if "needed_s" in row]
    lines += [f"- skipped, no time: {'; '.join(late)}"] if late else []
    return [*lines, ""] if others else lines


def _tables(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by their `case`, since those of different cases have different keys; one table where there is none."""
    cases = dict.fromkeys(row.get("case") for row in rows)
    return [[row for row in rows if row.get("case") == case] for case in cases]


def _published() -> list[str]:
    lines = ["Published, causal, D=128, TFLOP/s:", "", "| kernel | device | tokens | forward | backward | source |"]
    lines.append("|---|---|---|---|---|---|")
    for one in PUBLISHED:
        rates = (_rate(one.forward_tflops), _rate(one.backward_tflops))
        lines.append(f"| {' | '.join((one.kernel, one.device, _tokens(one.seq_len), *rates, one.source))} |")
    return [*lines, ""]


def _all_columns(rows: Sequence[Row]) -> list[Column]:
    """Every key of the rows that a line of text can hold."""
    hidden = {"label", "status", "error"}
    keys = dict.fromkeys(
        k for row in rows for k, v in row.items() if k not in hidden and not isinstance(v, dict | list)
    )
    return [(key, _short(key)) for key in keys]


def _short(key: str) -> Any:
    def cell(row: Row) -> str:
        value = row.get(key)
        return f"{value:.4g}" if isinstance(value, float) else plain(key)(row)

    return cell


def _rate(value: float | None) -> str:
    return DASH if value is None else f"{value:.0f}"


def _tokens(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _tflops(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e12:.4g} TFLOP/s"


def _cell(value: Any) -> str:
    """One line without the characters that end a cell."""
    return " ".join(str(value).split()).replace("|", "/")
