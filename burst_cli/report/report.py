"""`burst report`: runs side by side and against one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import RUNS_DIR, JsonOption, RunsDirOption
from burst_cli.outputs import check_output, write_output
from burst_cli.overrides import complete_run
from burst_cli.report import write
from burst_cli.report.build import build_report

app = new_verb()


@app.command()
def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXP]...",
            help="Experiments, run ids (or how they begin, or their last six digits) or run folders; none: every run.",
            autocompletion=complete_run,
        ),
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Only the newest run of each experiment.")] = False,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="ID", help="All cells of a sweep, those that never ran too.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", metavar="A B", help="Two runs (of an experiment the newest): is it more than chance?"
        ),
    ] = None,
    effective: Annotated[
        bool, typer.Option("--effective", help="Where the wall clock went: steps, start-up, restarts.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A page with plots (.html), or every figure (.csv)."),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show runs side by side, oldest first: speed, MFU, memory, traffic, losses, and where each run comes from.

    Without arguments every run is shown, failed and running ones too. A run without summary.json has its
    figures computed from metrics.jsonl. What is not known is a dash, null in JSON, empty in CSV.

    \b
    burst report --output report.html                a page with plots
    burst report --compare 1e6c0d 9f597e             two runs: is the difference more than chance?
    burst report tiny --latest --json | jq -e '.runs[0].mfu > 0.4'      exit code 1 for CI
    """
    check_output("--output", output, ".html", ".csv")
    if output is not None:
        write.check_is_ours(output)
    found = build_report(runs_dir, names or (), latest=latest, sweep=sweep, compared=compare, effective=effective)
    write.print_warnings(found, render.stderr())
    if output is not None:
        text, words = write.written(found, output.suffix.lower())
        write_output("--output", output, text.encode("utf-8", "replace"))
    if as_json:
        render.emit_json({**found.to_dict(), **({"output": str(output)} if output is not None else {})})
    elif output is not None:
        render.say(render.stdout(), f"wrote {output} ({words})")
    else:
        width = render.reading_width(render.stdout())
        render.stdout().print(write.report_view(found, width), width=width)
