"""`burst eval`: what the weights of a run, or of a folder, are worth; through the same launch as training."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.eval.request import evaluation_request, names_run
from burst_cli.launch.launch import launch_request
from burst_cli.options import ConfigDirOption, DryRunOption, FromOption, LaunchRequest, OutputOptions, from_folder
from burst_cli.overrides import complete_run_or_override
from engine.config.errors import ConfigError

app = new_verb()


@app.command()
def evaluate(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [OVERRIDES]...",
            help="A run id (or how it begins, or its last six digits), EXP, EXP/ID or a folder; then settings.",
            autocompletion=complete_run_or_override,
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="The checkpoint of this step; else the newest undamaged one.")
    ] = None,
    folder: FromOption = None,
    request: LaunchRequest,
    config_dir: ConfigDirOption = None,
    dry_run: DryRunOption = False,
    options: OutputOptions,
) -> int:
    """Evaluate weights: validation loss, loss by position, needles by depth. Trains and saves nothing.

    RUN is evaluated as it was trained: with its configuration, on its ranks and nodes, from its newest undamaged
    checkpoint. Overrides change that; a longer train.seq_len asks what it makes of more than it was trained on. The
    evaluation is a run of its own, in the folder EXP-eval, and `burst report` shows it.

    \b
    burst eval tiny train.eval_needle_depths=8
        hides a sentence at eight depths, and asks for it
    burst eval tiny --step 80 train.seq_len=8192 attention=ring
        an earlier checkpoint, on longer sequences, by another method
    burst eval exp=toy_8k --from ~/models/base
        a Hugging Face folder as it is

    The depths of needles count from the start of the text. `right` is the share of answers that greedy decoding
    writes; `gain` is what the needle saves of the answer's loss, which shows the use of context in models that are too
    small to be right.

    Exit codes as of `burst launch`: 0 completed, 1 failed, or nodes are not fit, 2 usage or configuration, 130
    interrupted.
    """
    if folder is not None and names_run(words or ()):
        raise ConfigError(f"--from {folder} and {(words or [''])[0]} both say what is evaluated; leave one of them out")
    overrides, folders = from_folder(folder, words or (), config_dir or ())
    launch = replace(request, config_dirs=folders, dry_run=dry_run)
    return launch_request(evaluation_request(overrides, step, launch), options)
