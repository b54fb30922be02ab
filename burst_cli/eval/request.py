"""From a run to the evaluation of its weights: the configuration to begin with, and where the weights lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from burst_cli import render
from burst_cli.checkpoint.view import bring
from burst_cli.checkpoint.weights import weights_of
from burst_cli.compose import compose
from burst_cli.options import LaunchRequest
from burst_cli.runs.choose import choose_run
from cluster.control.runner import runner_for
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, load_config
from engine.runs.folder import RunFolder

# What every evaluation is told: nothing is saved, and nothing trained.
OVERRIDES = (
    "train.evaluate_only=true",
    "train.checkpoint.at_end=false",
    "train.checkpoint.every_steps=null",
    "train.checkpoint.every_minutes=null",
)


def evaluation_request(words: tuple[str, ...], step: int | None, options: LaunchRequest) -> LaunchRequest:
    """The launch that evaluates what `words` name: a run and overrides, or overrides alone, by the files.

    Raises ConfigError for a run that does not exist or cannot be read, CheckpointError for one without weights.
    """
    name, overrides = _split(words)
    if name is None:
        if step is not None:
            raise ConfigError(f"--step {step} is of a run, but none is named; write burst eval RUN --step {step}")
        return replace(options, overrides=(*OVERRIDES, *overrides))
    if any(word.startswith("exp=") for word in overrides):
        raise ConfigError(f"burst eval {name}: the run says what is evaluated, so exp= cannot; leave one of them out")
    run = choose_run(name, options.runs_dir)
    words = (*OVERRIDES, *overrides)
    base = evaluation_base(run, weights_of(run, step))
    if _evaluates_here(options, words, base) and (brought := bring(run, step, render.stderr())) is not None:
        base = evaluation_base(run, str(brought.path.absolute()))
    return replace(options, overrides=words, base=base)


def _evaluates_here(options: LaunchRequest, words: tuple[str, ...], base: RunConfig) -> bool:
    """Whether the ranks will be on this machine, which may not be where those of the run were."""
    if options.names_nodes or runner_for(base.cluster).is_here:
        return False
    return runner_for(compose(words, options.config_dirs, base).config.cluster).is_here


def _split(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """(the name of a run, the overrides): a run comes first and is the only word that sets nothing."""
    return (words[0], words[1:]) if names_run(words) else (None, words)


def names_run(words: Sequence[str]) -> bool:
    """Return whether the first of these words is a run, not an override."""
    return bool(words) and "=" not in words[0] and not words[0].startswith(("~", "+"))


def evaluation_base(run: RunFolder, weights: str) -> RunConfig:
    """The configuration of `run` as one to begin with: its weights are those, its nodes are counted anew.

    Raises ConfigError when its config.yaml cannot be read.
    """
    config = load_config(run.path / "config.yaml")
    cluster = config.cluster if config.cluster.nodes is None else replace(config.cluster, num_nodes=None)
    train = replace(config.train, checkpoint=replace(config.train.checkpoint, resume_from=weights))
    return replace(config, model=replace(config.model, init_from=None), train=train, cluster=cluster)
