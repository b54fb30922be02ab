"""The options of `burst report`, each with the help that `--help` shows."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from burst_cli.completion import complete_run


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
