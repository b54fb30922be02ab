"""Arguments and options that several verbs share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from burst_cli.completion import complete_override, complete_run
from engine.runs.folder import RUNS_DIR_VARIABLE

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...",
        help="Settings in Hydra's grammar: exp=tiny train.steps=50 attention=burst",
        autocompletion=complete_override,
    ),
]

_RUN = "Run id (or how it begins, or its last six digits), EXP, EXP/ID or folder; none:"
NewestRunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help=f"{_RUN} the newest run.", autocompletion=complete_run)
]
LivingRunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help=f"{_RUN} the run that lives.", autocompletion=complete_run)
]

ConfigDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with your own exp/, model/, ... files; searched before all others. May be repeated.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]

RUNS_DIR = Path("runs")
RunsDirOption = Annotated[
    Path, typer.Option(metavar="FOLDER", envvar=RUNS_DIR_VARIABLE, file_okay=False, help="Folder of all runs.")
]

DetachOption = Annotated[
    bool, typer.Option(help="Return once the ranks run; a process in the background stays with them.")
]

DryRunOption = Annotated[bool, typer.Option(help="Show the files, environment and commands; create and start nothing.")]

AsOption = Annotated[
    Literal["kubernetes", "skypilot"] | None,
    typer.Option("--as", help="With --dry-run: print only this job or task, as YAML.", show_default=False),
]

ForceOption = Annotated[
    bool, typer.Option(help="Start also what may not fit into memory, and on nodes that are busy or differ.")
]

SkipChecksOption = Annotated[bool, typer.Option(help="Do not check the health of the nodes before.")]

PlainOption = Annotated[bool, typer.Option(help="Progress as lines, also on a terminal.")]
