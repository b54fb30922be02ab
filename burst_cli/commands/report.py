"""`burst report`: runs side by side, against one another and against what others published."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption, RunsDirOption
from burst_cli.report import options as of
from burst_cli.report.options import Format

if TYPE_CHECKING:
    from burst_cli.report.build import Report

app = new_verb()

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
    names: of.NamesArgument = None,
    runs_dir: RunsDirOption = None,
    latest: of.LatestOption = False,
    exp: of.ExpOption = None,
    status: of.StatusOption = None,
    since: of.SinceOption = None,
    limit: of.LimitOption = None,
    sweep: of.SweepOption = None,
    format: of.FormatOption = None,
    as_json: JsonOption = False,
    output: of.OutputOption = None,
    force: of.ForceOption = False,
    png: of.PngOption = None,
    columns: of.ColumnsOption = None,
    sort: of.SortOption = None,
    effective: of.EffectiveOption = False,
    baseline: of.BaselineOption = None,
    compare: of.CompareOption = None,
    by: of.ByOption = None,
    fail_below: of.BelowOption = None,
    fail_above: of.AboveOption = None,
    published: of.PublishedOption = None,
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
    _check_files(chosen, output, png, force)
    from burst_cli.report.build import Request, build_report
    from engine.runs import default_runs_dir

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
    _write(found, chosen, output, as_json=as_json)
    if png is not None:
        _write_picture(found, png)
    if found.failed_gates:
        raise typer.Exit(1)


def _where(format: Format | None, as_json: bool, output: Path | None) -> tuple[Format, Path | None]:
    """(format, file or None for standard output); --json prints its document whatever else is written."""
    if format is None and output is not None and not (as_json and output.suffix not in _FORMATS):
        format = _format_of(output)
    format = format or (Format.json if as_json else Format.table)
    if format is Format.html and output is None:
        output = DEFAULT_PAGE
    return format, output


def _format_of(output: Path) -> Format:
    """By the end of the name. Raises ConfigError for one that means a format which is not written."""
    from engine.errors import ConfigError

    if output.suffix.lower() not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ConfigError(
            f"--output {output}: no report is written in the format {output.suffix or 'of a name without an end'}; "
            f"expected a name that ends in {known}, or --format beside any name"
        )
    return _FORMATS[output.suffix.lower()]


def _check_files(format: Format, output: Path | None, png: Path | None, force: bool) -> None:
    """Raise before runs are read when a file cannot be written."""
    from burst_cli.report.draw import check_matplotlib
    from burst_cli.report.write import check_target
    from engine.errors import ConfigError

    if output is not None:
        check_target("--output", output, force=force)
    if png is not None:
        if png.suffix.lower() != ".png":
            raise ConfigError(f"--png: got {png.name!r}; the name must end in .png")
        check_matplotlib("--png")
        check_target("--png", png, force=force)


def _write(found: Report, format: Format, output: Path | None, *, as_json: bool) -> None:
    from burst_cli import render

    if output is None:
        _print(found, format)
        return
    from burst_cli.report.write import write_file

    text, words = _file_text(found, format)
    write_file("--output", output, text.encode("utf-8", "replace"))
    if as_json:
        render.emit_json({**found.to_dict(), "output": str(output)})
    else:
        render.stdout().print(f"wrote {output} ({words})", markup=False, soft_wrap=True)


def _print(found: Report, format: Format) -> None:
    from burst_cli import render

    if format is Format.json:
        render.emit_json(found.to_dict())
    elif format is not Format.table:
        sys.stdout.write(_file_text(found, format)[0].encode("utf-8", "replace").decode("utf-8"))
    elif found.records or found.comparison or found.published or found.sweep:
        from burst_cli.report.write import report_view

        console = render.stdout()
        console.print(report_view(found, console.width))
    else:
        console = render.stdout()
        console.print(_no_runs(found), markup=False, soft_wrap=True)


def _no_runs(found: Report) -> str:
    from engine.runs import list_runs

    if list_runs(found.runs_dir):
        return f"No run in {found.runs_dir.absolute()} passes these filters."
    return f"No runs in {found.runs_dir.absolute()}. Start one with `burst launch exp=tiny`."


def _file_text(found: Report, format: Format) -> tuple[str, str]:
    """(content, what is in it)."""
    from burst_cli.report import write
    from burst_cli.report.records import count_of

    runs = count_of("run", len(found.runs))
    if format is Format.html:
        page, plots = write.report_page(found)
        return page, f"{runs}, {count_of('plot', plots)}"
    if format is Format.md:
        return write.report_markdown(found), runs
    if format is Format.csv:
        return write.report_csv(found.runs), runs
    if format is Format.latex:
        return write.report_latex(found), runs
    if format is Format.json:
        from burst_cli.render import json_document

        return json_document(found.to_dict()), runs
    return _plain_table(found), runs


def _plain_table(found: Report) -> str:
    """The table as a file: as wide as it likes."""
    import io

    from rich.console import Console

    from burst_cli.render import PIPE_WIDTH
    from burst_cli.report.write import report_view

    stream = io.StringIO()
    Console(file=stream, width=PIPE_WIDTH, highlight=False, emoji=False).print(report_view(found, PIPE_WIDTH))
    return stream.getvalue()


def _write_picture(found: Report, path: Path) -> None:
    from burst_cli import render
    from burst_cli.report.write import report_picture, write_file

    write_file("--png", path, report_picture(found))
    render.stderr().print(f"wrote {path}", markup=False, soft_wrap=True)


def _warn(found: Report) -> None:
    """Name what is damaged, lost or failed on stderr."""
    from rich.text import Text

    from burst_cli import render
    from burst_cli.report.records import shortened

    console = render.stderr()
    for warning in shortened(found.warnings):
        console.print(Text.assemble(("warning: ", "yellow"), warning), soft_wrap=True)
    for line in shortened([verdict.line for verdict in found.failed_gates]):
        console.print(Text.assemble(("failed: ", "bold red"), line), soft_wrap=True)
