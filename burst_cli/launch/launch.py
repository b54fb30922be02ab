"""`burst launch`: train, on this machine, on nodes reached by SSH, or through Slurm."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import (
    AsOption,
    ConfigDirOption,
    DryRunOption,
    FromOption,
    LaunchRequest,
    OutputOptions,
    OverridesArgument,
    from_folder,
)
from burst_cli.overrides import ROOT_CONFIG, builtin_conf_dir, find_file, search_path
from engine.config.errors import ConfigError
from engine.runs.figures import count_of

app = new_verb()

EXIT_DECLINED = 1
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Start the demo without asking where no exp=NAME is given.")
]


@app.command()
def launch(
    *,
    overrides: OverridesArgument = None,
    folder: FromOption = None,
    request: LaunchRequest,
    config_dir: ConfigDirOption = None,
    run_path: Annotated[Path | None, typer.Option(hidden=True)] = None,
    dry_run: DryRunOption = False,
    form: AsOption = None,
    yes: YesOption = False,
    options: OutputOptions,
) -> int:
    """Train: write the run folder, start the ranks, show progress.

    Without nodes the ranks run on this machine. Nodes come from --hosts, --hostfile
    or cluster=NAME and are reached by SSH: all are asked first whether they can
    carry the run, then they get the code, and one supervisor each starts the ranks.
    With cluster.launcher=slurm or kubernetes, the scheduler chooses the nodes.

    \b
    burst launch exp=tiny train.steps=20
        on this machine
    burst launch exp=small --from ~/models/Qwen3-8B data=text 'data.paths=[books]'
        a model of Hugging Face: shape, weights, windows and tokenizer
    burst launch exp=small cluster=lab --detach
        on the nodes of conf/cluster/lab.yaml; `burst status` shows it
    burst launch exp=tiny cluster=testbed --dry-run
        all commands and files; nothing is created, there or here

    Without an experiment (exp=NAME) it says what the demo would do and asks;
    without a terminal it needs --yes.

    Ctrl-C once stops the ranks at the end of their step, twice kills them. A node
    that loses this machine stops its ranks after cluster.lease_s seconds.

    Exit codes: 0 completed, 1 failed, or nodes are not fit; 2 usage or
    configuration; 130 interrupted.
    """
    words, folders = from_folder(folder, overrides or (), config_dir or ())
    is_cell = run_path is not None  # of a sweep, which said before what it runs
    if not (yes or dry_run or is_cell or names_experiment(words, folders) or confirm_demo(words, folders)):
        return EXIT_DECLINED
    request = replace(request, overrides=words, config_dirs=folders, run_path=run_path, dry_run=dry_run)
    return launch_request(request, replace(options, form=form))


def names_experiment(words: Sequence[str], folders: Sequence[Path]) -> bool:
    """Whether these overrides choose an experiment, or a root file of a person's own does."""
    is_named = any(word.lstrip("+~").partition("=")[0].partition("@")[0] == "exp" for word in words)
    return is_named or find_file(search_path(folders), ROOT_CONFIG) != builtin_conf_dir() / f"{ROOT_CONFIG}.yaml"


def confirm_demo(words: Sequence[str], folders: Sequence[Path]) -> bool:
    """Say what a launch without an experiment would train, and ask. Raises ConfigError without a terminal."""
    from burst_cli.compose import compose  # loads Hydra, which `--help` need not

    config = compose(words, folders).config
    ranks = config.cluster.world_size
    where = "one rank per GPU" if ranks is None else count_of("rank", ranks)
    text = (
        f"no experiment is named, so this would train the demo (exp={config.exp}): {config.train.steps} steps of "
        f"{config.train.seq_len:,} tokens on {where}"
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        typed = " ".join(["burst launch", f"exp={config.exp}", *words])
        raise ConfigError(
            f"{text}. To start it type `{typed}`, or add --yes; `burst config --groups` lists experiments"
        )
    render.say(render.stderr(), text)
    return typer.confirm("Start it?", err=True)


def launch_request(request: LaunchRequest, options: OutputOptions) -> int:
    """The exit code of the launch that `request` means, or 0 once a rehearsal has shown it.

    Raises ConfigError for what was asked for, UnfitNodesError for nodes that cannot do it.
    """
    from burst_cli.launch.prepare import prepare_launch

    if options.form is not None and not request.dry_run:
        raise ConfigError(f"--as {options.form} prints what another program starts; add --dry-run")
    prepared = prepare_launch(request)
    from burst_cli.launch.show import launch_notes, show_job, show_plan  # loads the planner, as resolving did

    if options.form is not None:
        show_job(prepared.plan, options.form)
        return 0
    if request.dry_run:
        show_plan(prepared.plan, prepared.memory, prepared.survey.warnings, prepared.notes, as_json=options.as_json)
        return 0
    notes = launch_notes(prepared.memory, prepared.survey.warnings, prepared.notes)
    render.stderr().print(notes, soft_wrap=True, end="")
    prepared.survey.prepare(prepared.plan)
    from burst_cli.launch.launching import run_plan  # what a rehearsal does without

    return run_plan(prepared.plan, prepared.overrides, options)
