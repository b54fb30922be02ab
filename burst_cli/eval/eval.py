"""`burst eval`: what the weights of a run, or of a folder, are worth; through the same launch as training."""

from __future__ import annotations

from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.completion import complete_run_or_override
from burst_cli.eval.request import evaluation_request
from burst_cli.launch.launching import LaunchManner, launch_request
from burst_cli.launch.request import LaunchRequest
from burst_cli.options import (
    RUNS_DIR,
    ConfigDirOption,
    DetachOption,
    DryRunOption,
    ForceOption,
    JsonOption,
    PlainOption,
    RunsDirOption,
    SkipChecksOption,
)
from burst_cli.targets import HostfileOption, HostsOption

app = new_verb()


@app.command()
def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [OVERRIDES]...",
            help="A run id (or how it begins, or its last six digits), EXP, EXP/ID or a folder; then settings.",
            autocompletion=complete_run_or_override,
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The checkpoint of this step; else the newest undamaged one.")
    ] = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    config_dir: ConfigDirOption = None,
    runs_dir: RunsDirOption = RUNS_DIR,
    detach: DetachOption = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    skip_checks: SkipChecksOption = False,
    plain: PlainOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate weights: validation loss, loss by position, needles by depth. Trains and saves nothing.

    RUN is evaluated as it was trained: with its configuration, on its ranks and nodes, from its newest undamaged
    checkpoint. Overrides change that; a longer train.seq_len asks what it makes of more than it was trained on. The
    evaluation is a run of its own, in the folder EXP-eval, and `burst report` shows it.

    \b
    burst eval tiny train.eval_needle_depths=8
        hides a sentence at eight depths, and asks for it
    burst eval tiny --step 80 train.seq_len=8192 attention=ring
        an earlier checkpoint, on longer sequences, by another method
    burst eval exp=toy_8k model.init_from=$HOME/models/base
        a Hugging Face folder as it is

    The depths of needles count from the start of the text. `right` is the share of answers that greedy decoding
    writes; `gain` is what the needle saves of the answer's loss, which shows the use of context in models that are too
    small to be right.

    Exit codes as of `burst launch`: 0 completed, 1 failed, or nodes are not fit, 2 usage or configuration, 130
    interrupted.
    """
    options = LaunchRequest(
        (),
        tuple(config_dir or ()),
        runs_dir,
        None,
        hosts,
        hostfile,
        force=force,
        skip_checks=skip_checks,
        dry_run=dry_run,
    )
    request = evaluation_request(tuple(words or ()), step, options)
    manner = LaunchManner(plain_lines=plain, as_json=as_json, detach=detach)
    raise typer.Exit(launch_request(request, manner))
