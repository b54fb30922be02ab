"""`burst cancel`: have runs stopped, from any terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.completion import complete_run
from burst_cli.options import JsonOption, RunsDirOption

app = new_verb()


@app.command()
def cancel(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run ids (or how they begin, or their last six digits), EXP, EXP/ID, folders; none: the living one.",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Kill at once instead of waiting for the end of a step.")] = False,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run that has not ended.")] = False,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop runs and wait for their end: ranks are asked first and killed after 12 s (longer where
    they save a checkpoint first: train.checkpoint.stop_grace_s), with --now at once.

    Works while the launcher lives, for runs in the background, and after the launcher was killed: then the nodes are
    told from here. Nodes that cannot be reached are named; their ranks end by themselves when the lease ends
    (cluster.lease_s), except those of detached runs. Ctrl-C here leaves the request standing; while this command leads
    the stopping itself, a second Ctrl-C kills at once.

    Exit codes: 0 all have ended, also when they had before; 3 something may still run.
    """
    from burst_cli import render
    from burst_cli.runs.cancelling import cancel_runs, cancelled_text
    from burst_cli.runs.choose import choose_runs, living_runs
    from engine.config.errors import ConfigError
    from engine.runs.folder import default_runs_dir, list_runs

    if all_runs and run:
        raise ConfigError(f"--all means every run that has not ended; leave out {' '.join(run)}")
    chosen = living_runs(list_runs(runs_dir or default_runs_dir())) if all_runs else choose_runs(run or [], runs_dir)
    console = render.stderr()
    results = cancel_runs(chosen, now=now, say=lambda text: console.print(text, markup=False, soft_wrap=True))
    code = max((result.exit_code for result in results), default=0)
    if as_json:
        render.emit_json({"runs": [result.to_dict() for result in results], "exit_code": code})
    elif not results:
        render.stdout().print("All runs have ended.")
    else:
        for result in results:
            render.stdout().print(cancelled_text(result), soft_wrap=True)
    raise typer.Exit(code)
