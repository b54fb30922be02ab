"""What a launch reads and writes on disks, checked before ranks start: the run to go on from, room for checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.predict.flops import count_parameters
from engine.runs.checkpoints import checkpoints_folder, find_source
from engine.runs.figures import binary_bytes

_KEY = "train.checkpoint.resume_from"
_BYTES_PER_PARAMETER = 3 * 4  # the master weight and two moments; moments of 8 bits are saved as fp32, too


def with_source_paths(overrides: tuple[str, ...], runs_dir: Path) -> tuple[str, ...]:
    """`overrides` with the path of its checkpoints in place of a run that train.checkpoint.resume_from names.

    A path that exists here, or begins with / or ~, is left as it is. Raises ConfigError for a run that is not there,
    CheckpointError for one without checkpoints.
    """
    return tuple(_with_path(word, runs_dir) for word in overrides)


def _with_path(word: str, runs_dir: Path) -> str:
    key, _, value = word.partition("=")
    name = value.strip("'\"")
    if key.lstrip("+") != _KEY or name in ("", "null") or name.startswith(("/", "~")):
        return word
    # Only a launch that continues another run reads runs: all others start sooner without these.
    from burst_cli.checkpoint.weights import weights_of
    from burst_cli.runs.choose import choose_run

    # The folder of an experiment is no run: without this, a launch from within runs/ would mean it.
    is_run = (Path(name) / "run.json").exists()
    if is_run or (Path(name).is_dir() and Path(name).name.startswith(("step-", "checkpoints"))):
        return f"{key}='{Path(name).absolute()}'"
    try:
        return f"{key}='{weights_of(choose_run(name, runs_dir), None)}'"
    except ConfigError as error:
        raise ConfigError([f"{_KEY}={problem}" for problem in error.problems]) from error


def check_source(config: RunConfig) -> None:
    """Raise CheckpointError where ranks on this machine would find no checkpoint to go on from."""
    if (source := config.train.checkpoint.resume_from) is not None:
        find_source(Path(source).expanduser())


def checkpoint_bytes(config: RunConfig) -> int:
    """The size of one checkpoint: fp32 weights and both moments of every parameter, whatever ranks write which part."""
    return _BYTES_PER_PARAMETER * count_parameters(config.model).total


def check_room(config: RunConfig, run_path: Path, *, force: bool) -> tuple[str, ...]:
    """What to say of the room for checkpoints on this machine, or nothing where there is enough.

    Raises ConfigError when not one checkpoint fits, unless `force`.
    """
    settings = config.train.checkpoint
    if not settings.is_on or config.train.evaluate_only:
        return ()
    folder = checkpoints_folder(settings, run_path)
    disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    size, free = checkpoint_bytes(config), shutil.disk_usage(disk).free
    # A new one is written before the oldest is deleted.
    saves = settings.every_steps is not None or settings.every_minutes is not None
    number = settings.keep_last + 1 if saves else 1
    if free >= number * size:
        return ()
    text = (
        f"a checkpoint takes {binary_bytes(size)}, up to {number} at a time {binary_bytes(number * size)}, but "
        f"{folder} has {binary_bytes(free)} free. Free space, name another folder with train.checkpoint.folder, or "
        "lower train.checkpoint.keep_last"
    )
    if free < size and not force:
        raise ConfigError(f"{text}. To start it all the same, add --force.")
    return (f"warning: {text}",)
