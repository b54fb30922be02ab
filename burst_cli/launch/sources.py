"""What a launch reads and writes on disks, checked before ranks start: the run to go on from, room for checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from burst_cli.compose import Composed
from cluster.control.runner import runner_for
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.predict.room import find_shortage
from engine.runs.checkpoints import CheckpointError, checkpoints_folder, checkpoints_of, find_source, list_checkpoints

_KEY = "train.checkpoint.resume_from"


def quote_source(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """`overrides` in which what train.checkpoint.resume_from is set to is text: digits of a run id may look like a
    number."""
    return tuple(_quoted(word) for word in overrides)


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    name = value.strip("'\"")
    return word if key.lstrip("+") != _KEY or name in ("", "null") else f"{key}='{name}'"


def with_source_path(overrides: tuple[str, ...], composed: Composed, runs_dir: Path) -> tuple[str, ...]:
    """`overrides` of `composed`, with the path of its checkpoints where train.checkpoint.resume_from, typed or in a
    file, names a run.

    A path that begins with / or ~ stays; another path that is there is from the working folder of this process. Raises
    ConfigError for a run that is not there, CheckpointError for one without checkpoints where the ranks will be.
    """
    config = composed.config
    name = config.train.checkpoint.resume_from
    if name is None or name.startswith(("/", "~")):
        return overrides
    try:
        path = _path_of(name, config, runs_dir)
    except ConfigError as error:
        here = runner_for(config.cluster).is_here
        also = "" if here else "; a path on the nodes begins with / or ~/"
        place = composed.sources.get(_KEY, "")
        file = f" (in {place})" if place.endswith(".yaml") else ""
        raise ConfigError([f"{_KEY}={problem}{also}{file}" for problem in error.problems]) from error
    others = tuple(word for word in overrides if word.partition("=")[0].lstrip("+") != _KEY)
    return (*others, f"{_KEY}='{path}'")


def _path_of(name: str, config: RunConfig, runs_dir: Path) -> str:
    # Only a launch that continues another run reads runs: all others start sooner without these.
    from burst_cli.checkpoint.weights import weights_of
    from burst_cli.runs.choose import choose_run

    # The folder of an experiment is no run: without this, a launch from within runs/ would mean it.
    is_run = (Path(name) / "run.json").exists()
    if is_run or (Path(name).is_dir() and Path(name).name.startswith(("step-", "checkpoints"))):
        return str(Path(name).absolute())
    run, is_here = choose_run(name, runs_dir), runner_for(config.cluster).is_here
    if is_here and list_checkpoints(root := checkpoints_of(run.path)):
        return str(root.absolute())
    path = weights_of(run, None)
    if is_here:
        raise CheckpointError(
            f"{_KEY}={name}: the checkpoints of run {run.run_id} are on its nodes, {path}, but the ranks will be on "
            f"this machine; bring them here with `burst checkpoint fetch {run.run_id}`, or add --hosts NODES"
        )
    return path


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
