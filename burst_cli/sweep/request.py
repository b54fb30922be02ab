"""What `burst sweep` is told: light, for the shell asks for it at every press of the tab key."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

import typer

from burst_cli.options import RUNS_DIR, ConfigDirOption, FromOption, OverridesArgument, RunsDirOption

Retry = enum.StrEnum("Retry", "failed oom")


@dataclass(frozen=True)
class SweepRequest:
    """What was typed."""

    overrides: OverridesArgument = None
    folder: FromOption = None
    config_dir: ConfigDirOption = None
    runs_dir: RunsDirOption = RUNS_DIR
    parallel: Annotated[int, typer.Option(min=1, help="Cells at the same time, on disjoint sets of nodes.")] = 1
    max_failures: Annotated[int | None, typer.Option(min=1, help="Start no more cells after so many failed ones.")] = (
        None
    )
    retry: Annotated[list[Retry] | None, typer.Option(help="Run cells with this result again. May be repeated.")] = None
    skip_illegal: Annotated[bool, typer.Option(help="Record cells that cannot run as such, and run the others.")] = (
        False
    )
    force: Annotated[bool, typer.Option(help="Also run cells that are expected not to fit into memory.")] = False
    name: Annotated[str | None, typer.Option(help="Begins the sweep's id; another name runs the same cells anew.")] = (
        None
    )
