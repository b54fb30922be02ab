"""`burst sweep`: many runs from one command."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import RUNS_DIR, ConfigDirOption, JsonOption, OverridesArgument, RunsDirOption

app = new_verb()

Retry = enum.StrEnum("Retry", "failed oom")


@dataclass(frozen=True)
class SweepRequest:
    """What was typed."""

    overrides: OverridesArgument = None
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


@app.command()
def sweep(
    request: SweepRequest,
    dry_run: Annotated[
        bool, typer.Option(help="Show and check every cell, with the time it takes; start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Run every combination of the listed values, one launch per cell, and fill a table.

    All cells are composed and checked before the first one starts. The same command typed again goes on where it was
    ended, by Ctrl-C or by anything else: a cell that has a result is not run twice. Running out of memory is a result.

    \b
    burst sweep exp=tiny train.seq_len=1024,2048,4096 attention=burst,ring,ulysses
        nine cells, one after the other
    burst sweep exp=llama7b_1m cluster=lab 'train.seq_len=range(262144,1048577,262144)' --parallel 2
        two at a time, each on half of the nodes
    burst sweep exp=tiny 'attention=glob(*)' --skip-illegal --dry-run
        which methods are legal here, and what each is expected to take

    Ctrl-C once stops the running cells at the end of their step; twice kills them. Exit codes: 0 every cell has a
    result and none failed, 1 some failed, 2 usage or configuration, 130 interrupted.
    """
    from burst_cli.sweep.request import sweep_request

    return sweep_request(request, dry_run=dry_run, as_json=as_json)
