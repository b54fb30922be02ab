"""`burst sweep`: many runs from one command."""

from __future__ import annotations

from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import JsonOption
from burst_cli.sweep.request import SweepRequest

app = new_verb()


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
    from burst_cli.sweep.sweeping import sweep_request

    return sweep_request(request, dry_run=dry_run, as_json=as_json)
