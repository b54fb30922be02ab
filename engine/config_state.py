"""Rules of what a run begins with, saves and refuses to learn: first weights, checkpoints, the guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config import RunConfig
from engine.config_machines import runs_elsewhere
from engine.config_schema import Problem
from engine.errors import ConfigError
from engine.pretrained.shape import differences, read_pretrained


def state_problems(config: RunConfig) -> Iterator[Problem]:
    """One problem per broken rule."""
    yield from _guard(config)
    yield from _evaluation(config)
    yield from _other_tokens(config)
    if runs_elsewhere(config.cluster):
        yield from _paths_elsewhere(config)
    elif config.model.init_from is not None:
        yield from _first_weights(config, Path(config.model.init_from).expanduser())


def start_problems(config: RunConfig) -> Iterator[Problem]:
    """What stands against starting a run, but not against looking at its plan or preparing its data."""
    model = config.model
    if model.require_init_from and model.init_from is None and config.train.checkpoint.resume_from is None:
        yield Problem(
            ("model.require_init_from", "model.init_from"),
            f"model.init_from: null, but exp={config.exp} goes on with a trained model and would start from random "
            "weights; set model.init_from=FOLDER of a Hugging Face model (`burst model FOLDER` shows its settings), or "
            "model.require_init_from=false to train from scratch",
        )


def _guard(config: RunConfig) -> Iterator[Problem]:
    guard, checkpoint = config.train.guard, config.train.checkpoint
    if "rewind" in guard.reactions and not (checkpoint.is_periodic or config.train.evaluate_only):
        yield Problem(
            ("train.guard", "train.checkpoint.every_steps"),
            "train.guard: rewind goes back to a checkpoint, but none is saved; set train.checkpoint.every_steps or "
            "train.checkpoint.every_minutes",
        )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    train = config.train
    if train.evaluate_only and train.checkpoint.resume_from is None and config.model.init_from is None:
        yield Problem(
            ("train.evaluate_only", "train.checkpoint.resume_from", "model.init_from"),
            "train.evaluate_only=true evaluates weights that are there, but none are named; set "
            "train.checkpoint.resume_from or model.init_from, or use `burst eval RUN`",
        )


def _other_tokens(config: RunConfig) -> Iterator[Problem]:
    """Ids of a tokenizer that was trained just now mean nothing to weights that are older."""
    if config.model.init_from is not None and config.data.tokenizer == "bpe" and config.data.format != "shards":
        yield Problem(
            ("data.tokenizer", "model.init_from"),
            f"data.tokenizer=bpe is trained on this corpus, so the weights of model.init_from={config.model.init_from} "
            "know none of its tokens; set data.tokenizer to the tokenizer.json that they were trained with, often "
            f"{config.model.init_from}/tokenizer.json",
        )


def _paths_elsewhere(config: RunConfig) -> Iterator[Problem]:
    """Ranks on other machines start in a folder of their own, so no path can be meant from here."""
    settings = config.train.checkpoint
    named = {
        "train.checkpoint.folder": settings.folder,
        "train.checkpoint.resume_from": settings.resume_from,
        "model.init_from": config.model.init_from,
        **{f"data.mix_paths[{index}]": path for index, path in enumerate(config.data.mix_paths)},
    }
    for key, path in named.items():
        if path is not None and not path.startswith(("/", "~/")):
            yield Problem((key,), f"{key}: got {path!r}, expected a path on the nodes that begins with / or ~/")


def _first_weights(config: RunConfig, folder: Path) -> Iterator[Problem]:
    try:
        pretrained = read_pretrained(folder)
    except ConfigError as error:
        yield Problem(("model.init_from",), f"model.init_from: {error}")
        return
    if found := differences(config.model, pretrained.model):
        yield Problem(
            ("model.init_from",),
            f"model.init_from={folder} holds another model: {'; '.join(found)}. `burst model {folder}` shows its shape",
        )
    attention, window = config.attention, pretrained.window_tokens
    kinds = {*attention.mask_layers} or {attention.mask}
    if window is not None and "causal" in kinds and config.train.seq_len > window:
        yield Problem(
            ("model.init_from", "attention.mask", "attention.window_tokens"),
            f"model.init_from={folder}: its tokens look at {window} tokens, but attention.mask=causal lets them look "
            f"at all {config.train.seq_len}; set attention.mask=window attention.window_tokens={window}",
        )
