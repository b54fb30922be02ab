"""What a launch reads and writes on disks, checked before ranks start: the run to go on from, room for checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.checkpoints import checkpoints_folder, find_source
from engine.runs.room import find_shortage

_KEY = "train.checkpoint.resume_from"


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
    from burst_cli.eval.request import weights_of
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


def check_room(config: RunConfig, run_path: Path, *, force: bool) -> tuple[str, ...]:
    """What to say of the room for checkpoints on this machine, or nothing where there is enough.

    Raises ConfigError when not one checkpoint fits, unless `force`.
    """
    folder = checkpoints_folder(config.train.checkpoint, run_path)
    disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    shortage = find_shortage(config, str(folder), shutil.disk_usage(disk).free)
    if shortage is None:
        return ()
    text = f"{shortage.text}. {shortage.remedy[0].upper()}{shortage.remedy[1:]}"
    if shortage.is_total and not force:
        raise ConfigError(f"{text}. To start it all the same, add --force.")
    return (f"warning: {text}",)
