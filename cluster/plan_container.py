"""Containers of ranks: what their command line says of users, machines and mounts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from cluster.env.facts import EnvironmentVariable
from engine.config.cluster import ContainerConfig
from engine.config.errors import ConfigError
from engine.config.settings import DataConfig, RunConfig

RUN_LABEL = "burst.run"
CACHE_VARIABLE = "BURST_CACHE_DIR"  # where ranks in a container keep prepared data
SHARED_MEMORY = ("--ipc=host",)
STACK = ("--ulimit", "stack=67108864")
LOCKED_MEMORY = ("--ulimit", "memlock=-1")
INFINIBAND = ("--device=/dev/infiniband", "--cap-add=IPC_LOCK")
GPUS = ("--gpus=all",)


def engine_words(command: str) -> tuple[str, ...]:
    """`cluster.container.command` as words. Raises ConfigError for one that cannot be split or is empty."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"cluster.container.command={command!r}: {error}") from error
    if not words:
        raise ConfigError("cluster.container.command is empty; expected a command line such as docker")
    return words


def user_options(config: ContainerConfig, owner: str, groups: Sequence[int]) -> list[str]:
    """Who the ranks are in there: `owner`, UID:GID, and its other groups, which `--user` drops: they open shared data.

    Unless the configuration names groups itself, such as podman's keep-groups, which allows no others.
    """
    if any(option.startswith("--group-add") for option in config.run_options or ()):
        groups = ()
    others = [f"--group-add={group}" for group in groups if group != int(owner.partition(":")[2])]
    return ["--user", owner, *others]


def machine_options(config: ContainerConfig, *, has_gpus: bool, has_infiniband: bool) -> tuple[str, ...]:
    """What the ranks may use of the machine, unless the configuration says it."""
    if config.run_options is not None:
        return config.run_options
    gpus = GPUS if has_gpus else ()
    return (*SHARED_MEMORY, *LOCKED_MEMORY, *STACK, *gpus, *(INFINIBAND if has_infiniband else ()))


def user_variables(home: str, user: str, cache: str) -> list[EnvironmentVariable]:
    """For a user whom the image does not know. Of its home the engine makes what lies above mounts, as root."""
    return [
        EnvironmentVariable("HOME", home, "the image knows no home of this user"),
        EnvironmentVariable("USER", user, "the image knows no name of this user"),
        EnvironmentVariable(CACHE_VARIABLE, cache, "prepared data stay on the node"),
        EnvironmentVariable("TRITON_CACHE_DIR", f"{cache}/triton", "the home is root's in there; this folder is not"),
    ]


def read_mounts(settings: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """(path, is writable) of every setting PATH or PATH:rw."""
    return tuple((setting.removesuffix(":rw"), setting.endswith(":rw")) for setting in settings)


def state_mounts(config: RunConfig, home: str) -> list[tuple[str, bool]]:
    """Where checkpoints are written, what a run begins with or goes on from, data mixed in; `home` stands for ~."""
    settings, mounts = config.train.checkpoint, []
    if settings.folder is not None:
        mounts.append((at_home(settings.folder, home), True))
    if settings.resume_from is not None:
        source = PurePosixPath(at_home(settings.resume_from, home))
        # What lies beside a checkpoint tells which disk this is.
        mounts.append((str(source.parent if source.name.startswith("step-") else source), False))
    if config.model.init_from is not None:
        mounts.append((at_home(config.model.init_from, home), False))
    mounts += [(at_home(path, home), False) for path in config.data.mix_paths]
    return mounts


def text_files(data: DataConfig) -> list[str]:
    """What turns text into tokens: the tokenizer's file, or its folder for a chat template in it; a template's own."""
    found = [] if data.chat_template in (None, "chatml") else [str(data.chat_template)]
    if data.tokenizer not in ("bytes", "bpe"):
        found.append(data.tokenizer if data.messages_field is None else str(PurePosixPath(data.tokenizer).parent))
    return found


def at_home(path: str, home: str) -> str:
    """`path` with `home` in place of a leading ~."""
    return f"{home}{path[1:]}" if path.startswith("~/") else path


def merge_mounts(mounts: Sequence[tuple[str, bool]]) -> tuple[tuple[str, bool], ...]:
    """Every path once, writable if one asks for that; the shortest first, for a mount hides what lies below it."""
    wanted: dict[str, bool] = {}
    for path, is_writable in mounts:
        wanted[path] = wanted.get(path, False) or is_writable
    return tuple(sorted(wanted.items(), key=lambda mount: (mount[0].count("/"), mount[0])))


def fixed_part(path: str) -> str:
    """The folder above the first part of `path` that is a pattern; `path` itself where none is."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if any(mark in part for mark in "*?[")), None)
    return path if first is None else "/".join(parts[:first]) or "/"
