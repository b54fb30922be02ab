"""`burst report`: runs side by side, against one another and against what others published."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.completion import complete_run
from burst_cli.options import JsonOption, RunsDirOption

if TYPE_CHECKING:
    from burst_cli.report.build import Report

app = new_verb()


class Format(enum.StrEnum):
    """How a report is written."""

    table = "table"
    md = "md"
    csv = "csv"
    json = "json"
    html = "html"
    latex = "latex"


_WHICH, _HOW, _AGAINST = "Which runs", "How it is written", "Compared with what"

NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN|EXP]...",
        help="Experiments, run ids (or how they begin, or their last six digits) or run folders; none: every run.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
LatestOption = Annotated[
    bool, typer.Option("--latest", help="Only the newest run of each experiment.", rich_help_panel=_WHICH)
]
ExpOption = Annotated[
    list[str] | None,
    typer.Option("--exp", help="Experiments by glob: 'llama*'. May be repeated.", rich_help_panel=_WHICH),
]
StatusOption = Annotated[
    list[str] | None,
    typer.Option("--status", help="Only these: completed,oom,failed,...", rich_help_panel=_WHICH),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", help="Made since 2026-01-31, 2026-01-31T12:00 (UTC), or 12h, 7d.", rich_help_panel=_WHICH),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only the newest N of what is left.", rich_help_panel=_WHICH)
]
SweepOption = Annotated[
    str | None,
    typer.Option("--sweep", metavar="ID", help="All cells of a sweep, missing ones too.", rich_help_panel=_WHICH),
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="Default: table, or what --output ends in.", rich_help_panel=_HOW),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write there; html without it: report.html.", rich_help_panel=_HOW
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace a file that is no report of ours too.", rich_help_panel=_HOW)
]
PngOption = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="Also the plots, as one picture.", rich_help_panel=_HOW)
]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="A,B,...", help="Only these; `--columns help` lists all.", rich_help_panel=_HOW),
]
SortOption = Annotated[
    str | None,
    typer.Option("--sort", metavar="COLUMN", help="Upwards; -COLUMN downwards.", rich_help_panel=_HOW),
]
EffectiveOption = Annotated[
    bool,
    typer.Option("--effective", help="Where the wall clock went: steps, start-up, restarts.", rich_help_panel=_HOW),
]
BaselineOption = Annotated[
    str | None,
    typer.Option("--baseline", metavar="METHOD|RUN", help="Speed and memory against it.", rich_help_panel=_AGAINST),
]
CompareOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare",
        metavar="A B",
        help="Two runs or experiments: is the difference chance?",
        rich_help_panel=_AGAINST,
    ),
]
ByOption = Annotated[
    str | None,
    typer.Option("--by", metavar="KEY", help="A and B are values of this: git_sha, policy.", rich_help_panel=_AGAINST),
]
BelowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-below",
        metavar="METRIC=VALUE",
        help="Exit 1 when a run lies below: mfu=40%, mfu=90%ofring. May be repeated.",
        rich_help_panel=_AGAINST,
    ),
]
AboveOption = Annotated[
    list[str] | None,
    typer.Option("--fail-above", metavar="METRIC=VALUE", help="The same upwards.", rich_help_panel=_AGAINST),
]
PublishedOption = Annotated[
    str | None,
    typer.Option("--published", metavar="all|SYSTEM", help="Figures of others with caveats.", rich_help_panel=_AGAINST),
]

DEFAULT_PAGE = Path("report.html")
_FORMATS = {
    ".html": Format.html,
    ".htm": Format.html,
    ".md": Format.md,
    ".csv": Format.csv,
    ".json": Format.json,
    ".tex": Format.latex,
    ".txt": Format.table,
}


@app.command()
def report(
    names: NamesArgument = None,
    runs_dir: RunsDirOption = None,
    latest: LatestOption = False,
    exp: ExpOption = None,
    status: StatusOption = None,
    since: SinceOption = None,
    limit: LimitOption = None,
    sweep: SweepOption = None,
    format: FormatOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
    png: PngOption = None,
    columns: ColumnsOption = None,
    sort: SortOption = None,
    effective: EffectiveOption = False,
    baseline: BaselineOption = None,
    compare: CompareOption = None,
    by: ByOption = None,
    fail_below: BelowOption = None,
    fail_above: AboveOption = None,
    published: PublishedOption = None,
) -> None:
    """Show runs side by side, oldest first: speed, MFU, memory, traffic, losses, and where each run comes from.

    Without arguments every run is shown, failed and running ones too. A run without summary.json has its
    figures computed from metrics.jsonl. What is not known is a dash, null in JSON, empty in CSV.

    \b
    burst report --format html                       a page with plots
    burst report llama7b --baseline ring             ratios against a method
    burst report --compare 1e6c0d 9f597e             two runs: is the difference more than chance?
    burst report llama7b --by git_sha --compare 2182b04 139fdee
    burst report tiny --latest --fail-below mfu=40%  exit code 1 for CI
    """
    from burst_cli.report.columns import column_help

    if columns and "help" in columns:
        sys.stdout.write(column_help())
        return
    chosen, output = _where(format, as_json, output)
    _check_files(output, png, force=force)
    from burst_cli import render
    from burst_cli.report.build import Request, build_report
    from burst_cli.report.write import report_picture, write_file
    from engine.runs.folder import default_runs_dir

    request = Request(
        runs_dir=runs_dir or default_runs_dir(),
        names=tuple(names or ()),
        exps=tuple(exp or ()),
        statuses=tuple(status or ()),
        since=since,
        latest=latest,
        limit=limit,
        columns=tuple(columns or ()),
        sort=sort,
        sweep=sweep,
        baseline=baseline,
        compare=compare,
        by=by,
        fail_below=tuple(fail_below or ()),
        fail_above=tuple(fail_above or ()),
        published=published,
        effective=effective,
        is_page=chosen is Format.html,
    )
    found = build_report(request)
    _warn(found)
    _deliver(found, chosen, output, as_json=as_json)
    if png is not None:
        write_file("--png", png, report_picture(found))
        render.stderr().print(f"wrote {png}", markup=False, soft_wrap=True)
    if found.failed_gates:
        raise typer.Exit(1)


def _where(format: Format | None, as_json: bool, output: Path | None) -> tuple[Format, Path | None]:
    """(format, file or None for standard output); --json prints its document whatever else is written.

    Raises ConfigError for a name whose end means no format.
    """
    from engine.config.errors import ConfigError

    if format is None and output is not None:
        format = _FORMATS.get(output.suffix.lower())
        if format is None and not as_json:
            raise ConfigError(
                f"--output {output}: no report is written in the format {output.suffix or 'of a name without an end'}; "
                f"expected a name that ends in {', '.join(_FORMATS)}, or --format beside any name"
            )
    format = format or (Format.json if as_json else Format.table)
    return format, DEFAULT_PAGE if format is Format.html and output is None else output


def _check_files(output: Path | None, png: Path | None, *, force: bool) -> None:
    """Raise before runs are read when a file cannot be written."""
    from burst_cli.report.draw import check_matplotlib
    from burst_cli.report.write import check_target
    from engine.config.errors import ConfigError

    if output is not None:
        check_target("--output", output, force=force)
    if png is not None:
        if png.suffix.lower() != ".png":
            raise ConfigError(f"--png: got {png.name!r}; the name must end in .png")
        check_matplotlib("--png")
        check_target("--png", png, force=force)


def _deliver(found: Report, format: Format, output: Path | None, *, as_json: bool) -> None:
    """Into a file, or onto standard output."""
    from burst_cli import render
    from burst_cli.report.write import write_file

    if output is None:
        _print(found, format)
        return
    text, words = _written(found, format)
    write_file("--output", output, text.encode("utf-8", "replace"))
    if as_json:
        render.emit_json({**found.to_dict(), "output": str(output)})
    else:
        render.stdout().print(f"wrote {output} ({words})", markup=False, soft_wrap=True)


def _print(found: Report, format: Format) -> None:
    from burst_cli import render
    from burst_cli.report.write import report_view
    from engine.runs.folder import list_runs

    console = render.stdout()
    if format is not Format.table:
        sys.stdout.write(_written(found, format)[0].encode("utf-8", "replace").decode("utf-8"))
    elif found.records or found.comparison or found.published or found.sweep:
        console.print(report_view(found, console.width))
    else:
        where = found.runs_dir.absolute()
        text = f"No run in {where} passes these filters."
        if not list_runs(found.runs_dir):
            text = f"No runs in {where}. Start one with `burst launch exp=tiny`."
        console.print(text, markup=False, soft_wrap=True)


def _written(found: Report, format: Format) -> tuple[str, str]:
    """(the content of a file, what is in it)."""
    from burst_cli.figures import count_of
    from burst_cli.render import json_document
    from burst_cli.report import write

    runs = count_of("run", len(found.runs))
    if format is Format.html:
        page, plots = write.report_page(found)
        return page, f"{runs}, {count_of('plot', plots)}"
    writers: dict[Format, Callable[[Report], str]] = {
        Format.md: write.report_markdown,
        Format.csv: lambda found: write.report_csv(found.runs),
        Format.latex: write.report_latex,
        Format.json: lambda found: json_document(found.to_dict()),
        Format.table: write.report_text,
    }
    return writers[format](found), runs


def _warn(found: Report) -> None:
    """Name what is damaged, lost or failed on stderr."""
    from rich.text import Text

    from burst_cli import render
    from burst_cli.report.records import first_of

    console = render.stderr()
    for warning in first_of(found.warnings):
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)
    for line in first_of([verdict.line for verdict in found.failed_gates]):
        console.print(Text.assemble(("failed: ", "bold red"), line), soft_wrap=True)
