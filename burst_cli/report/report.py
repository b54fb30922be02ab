"""`burst report`: runs side by side and against one another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.completion import complete_run
from burst_cli.options import RUNS_DIR, JsonOption, RunsDirOption
from burst_cli.outputs import check_output, write_output
from burst_cli.report import write
from burst_cli.report.build import Request, build_report
from burst_cli.report.columns import COLUMNS, column_help
from engine.config.errors import ConfigError

app = new_verb()


Format = Literal["table", "md", "csv", "json", "html", "latex"]
_which, _how, _against = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Which runs", "How it is written", "Compared with what")
)


DEFAULT_PAGE = Path("report.html")
_FORMATS: dict[str, Format] = {
    ".html": "html",
    ".htm": "html",
    ".md": "md",
    ".csv": "csv",
    ".json": "json",
    ".tex": "latex",
    ".txt": "table",
}


@app.command()
def report(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|EXP]...",
            help="Experiments, run ids (or how they begin, or their last six digits) or run folders; none: every run.",
            autocompletion=complete_run,
        ),
    ] = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    latest: Annotated[bool, _which("--latest", help="Only the newest run of each experiment.")] = False,
    exps: Annotated[list[str] | None, _which("--exp", help="Experiments by glob: 'llama*'. May be repeated.")] = None,
    statuses: Annotated[list[str] | None, _which("--status", help="Only these: completed,oom,failed,...")] = None,
    since: Annotated[
        str | None, _which("--since", help="Made since 2026-01-31, 2026-01-31T12:00 (UTC), or 12h, 7d.")
    ] = None,
    limit: Annotated[int | None, _which("--limit", min=1, help="Only the newest N of what is left.")] = None,
    sweep: Annotated[
        str | None, _which("--sweep", metavar="ID", help="All cells of a sweep, missing ones too.")
    ] = None,
    format: Annotated[Format | None, _how("--format", help="Default: table, or what --output ends in.")] = None,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None, _how("--output", "-o", metavar="FILE", help="Write there; html without it: report.html.")
    ] = None,
    columns: Annotated[
        list[str] | None, _how("--columns", metavar="A,B,...", help="Only these; `--columns help` lists all.")
    ] = None,
    sort: Annotated[str | None, _how("--sort", metavar="COLUMN", help="Upwards; -COLUMN downwards.")] = None,
    effective: Annotated[
        bool, _how("--effective", help="Where the wall clock went: steps, start-up, restarts.")
    ] = False,
    baseline: Annotated[
        str | None, _against("--baseline", metavar="METHOD|RUN", help="Speed and memory against it.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        _against("--compare", metavar="A B", help="Two runs, experiments or KEY=VALUE: is the difference chance?"),
    ] = None,
    fail_below: Annotated[
        list[str] | None,
        _against(
            "--fail-below",
            metavar="METRIC=VALUE",
            help="Exit 1 when a run lies below: mfu=40%, mfu=90%ofring. May be repeated.",
        ),
    ] = None,
    fail_above: Annotated[
        list[str] | None, _against("--fail-above", metavar="METRIC=VALUE", help="The same upwards.")
    ] = None,
) -> None:
    """Show runs side by side, oldest first: speed, MFU, memory, traffic, losses, and where each run comes from.

    Without arguments every run is shown, failed and running ones too. A run without summary.json has its
    figures computed from metrics.jsonl. What is not known is a dash, null in JSON, empty in CSV.

    \b
    burst report --format html                       a page with plots
    burst report llama7b --baseline ring             ratios against a method
    burst report --compare 1e6c0d 9f597e             two runs: is the difference more than chance?
    burst report llama7b --compare git_sha=2182b04 git_sha=139fdee
    burst report tiny --latest --fail-below mfu=40%  exit code 1 for CI
    """
    if columns and "help" in columns:
        if as_json:
            render.emit_json({"columns": [{"key": c.key, "heading": c.heading, "doc": c.doc} for c in COLUMNS]})
        else:
            sys.stdout.write(column_help())
    else:
        _report(context.params)


def _report(typed: Mapping[str, Any]) -> None:
    """Build what was typed, and write it where it is wanted; exit code 1 when a gate fails."""
    as_json = typed["as_json"]
    chosen, output = _where(typed["format"], as_json, typed["output"])
    check_output("--output", output)
    write.check_is_ours(output)
    given = {name: typed[name] for name in Request.__dataclass_fields__ if typed.get(name) is not None}
    found = build_report(Request(**given, is_page=chosen == "html"))
    write.print_warnings(found, render.stderr())
    if output is not None:
        text, words = write.written(found, chosen)
        write_output("--output", output, text.encode("utf-8", "replace"))
        if as_json:
            render.emit_json({**found.to_dict(), "output": str(output)})
        else:
            render.stdout().print(f"wrote {output} ({words})", markup=False, soft_wrap=True)
    elif chosen == "table":
        render.stdout().print(write.report_view(found, render.stdout().width))
    else:
        sys.stdout.write(write.written(found, chosen)[0].encode("utf-8", "replace").decode("utf-8"))
    if found.failed_gates:
        raise typer.Exit(1)


def _where(format: Format | None, as_json: bool, output: Path | None) -> tuple[Format, Path | None]:
    """(format, file or None for standard output); --json prints its document whatever else is written.

    Raises ConfigError for a name whose end means no format.
    """
    if format is None and output is not None:
        format = _FORMATS.get(output.suffix.lower())
        if format is None and not as_json:
            raise ConfigError(
                f"--output {output}: no report is written in the format {output.suffix or 'of a name without an end'}; "
                f"expected a name that ends in {', '.join(_FORMATS)}, or --format beside any name"
            )
    format = format or ("json" if as_json else "table")
    if as_json and output is None and format not in ("json", "html"):
        raise ConfigError(f"--json and --format {format} exclude each other on standard output; add --output FILE")
    return format, DEFAULT_PAGE if format == "html" and output is None else output
