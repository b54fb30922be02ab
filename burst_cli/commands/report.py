"""`burst report`: runs side by side."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption, RunsDirOption

app = new_verb()


class Format(enum.StrEnum):
    """How a report is written."""

    table = "table"
    md = "md"
    csv = "csv"
    json = "json"


@app.command()
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXP]...",
            help="Experiments, run ids (or how they begin, or their last six digits) or run folders; none: every run.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDirOption = None,
    latest: Annotated[bool, typer.Option("--latest", help="Only the newest run of each experiment.")] = False,
    format: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.table,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side, oldest first: speed, MFU, memory, traffic, losses.

    Without arguments every run is shown, failed and running ones too. A run without summary.json has its figures
    computed from metrics.jsonl. What is not known is a dash, null in JSON, empty in CSV.
    """
    from burst_cli.run_records import run_record, select_runs
    from engine.runs import default_runs_dir

    root = runs_dir or default_runs_dir()
    records = [run_record(run) for run in select_runs(root, names or [], latest=latest)]
    _warn(records)
    _write(records, root, Format.json if as_json else format)


def _write(records: list[dict[str, Any]], root: Path, format: Format) -> None:
    from burst_cli import render

    if format is Format.json:
        render.emit_json({"runs": records})
        return
    from burst_cli.report_table import report_csv, report_markdown, report_table

    if format is Format.csv:
        sys.stdout.write(report_csv(records))
    elif format is Format.md:
        sys.stdout.write(report_markdown(records))
    elif records:
        console = render.stdout()
        console.print(report_table(records, console.width))
    else:
        render.stdout().print(f"No runs in {root.absolute()}. Start one with `burst launch exp=tiny`.", markup=False)


def _warn(records: list[dict[str, Any]]) -> None:
    """Name what is damaged or lost on stderr."""
    from rich.text import Text

    from burst_cli import render

    console = render.stderr()
    for record in records:
        for problem in record.get("problems", ()):
            console.print(Text.assemble(("warning: ", "yellow"), problem), soft_wrap=True)
        if record.get("alive") is False:
            text = f"{record['exp']}/{record['run_id']} says {record['status']}, but its process is gone"
            console.print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)
