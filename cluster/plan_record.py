"""A launch plan from RUN/launch.json. The file may be damaged or made by somebody else: everything in it is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from cluster.env.facts import EnvironmentVariable
from cluster.errors import ClusterError
from cluster.launch.runner import RUNNERS, runner_of
from cluster.plan import CONFIG_FILE, NODE_FILES, PLAN_FILE, PLAN_FORMAT, Backend, LaunchPlan, NodePlan
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name
from engine.config.errors import ConfigError
from engine.config.settings import config_from_dict
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder

MAX_BYTES = 64 << 20
MAX_NODES = 16384
_BACKENDS = ("nccl", "gloo")
_KINDS = {int: "a whole number", str: "a text", bool: "true or false", dict: "a table", list: "a list"}
T = TypeVar("T")


class PlanFileError(ClusterError):
    """What should be a launch plan is none."""


def read_launch_plan(run_path: Path) -> LaunchPlan:
    """The plan of the run in folder `run_path`, also after that folder was moved. Raises PlanFileError."""
    path = run_path / PLAN_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        plan = plan_from_dict(json.loads(raw))
    except FileNotFoundError as error:
        raise PlanFileError(f"{path}: there is none, so `burst launch` did not start this run") from error
    except (OSError, ValueError, RecursionError, PlanFileError) as error:
        raise PlanFileError(f"{path}: not a launch plan: {one_line(str(error), 300)}") from error
    plan = _moved(plan, run_path.absolute())
    return runner_of(plan).with_nodes(plan)


def write_plan_files(plan: LaunchPlan, run: RunFolder) -> None:
    """Lay the files of `plan` into the folder of a run that has one, each in the place of the one before it.

    Raises ClusterError.
    """
    for name, text in plan.files:
        path = run.path / name
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            raise ClusterError(f"{path}: {error.strerror}") from error


def with_texts(plan: LaunchPlan) -> LaunchPlan:
    """`plan` with the texts that other machines need to start it, read from its run folder unless it has them.

    A plan that comes from launch.json has none. Raises PlanFileError.
    """
    names = {name for node in plan.nodes if node.folder != plan.run_path for name in (*NODE_FILES, node.env_file)}
    found = {name: _text(Path(plan.run_path), name) for name in sorted(names - dict(plan.files).keys())}
    return replace(plan, files=(*plan.files, *((name, text) for name, text in found.items() if text is not None)))


def _text(folder: Path, name: str) -> str | None:
    """A file of a run folder; None when there is none and the ranks can do without it."""
    try:
        if (folder / name).stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if name != CONFIG_FILE:
            return None
        raise PlanFileError(f"{folder / name}: there is none, but the nodes of the run need it") from error
    except (OSError, ValueError) as error:
        text = one_line(str(error), 300)
        raise PlanFileError(f"{folder / name}: cannot be read, but the nodes of the run need it: {text}") from error


def plan_from_dict(document: Any) -> LaunchPlan:
    """The plan that `LaunchPlan.to_dict` wrote, `files` included if they are there.

    Raises PlanFileError, naming what is wrong.
    """
    if _value(document, "format", int) != PLAN_FORMAT:
        raise PlanFileError(f"format: got {document['format']}, expected {PLAN_FORMAT}; made by another burst?")
    try:
        config = config_from_dict(_value(document, "config", dict))
    except ConfigError as error:
        raise PlanFileError(f"config: {error}") from error
    cluster, backend, launcher = config.cluster, _value(document, "backend", str), _value(document, "launcher", str)
    if backend not in _BACKENDS or launcher not in RUNNERS:
        raise PlanFileError(f"backend, launcher: {one_line(f'{backend}, {launcher}', 80)}: not known here")
    nodes = tuple(map(_node, _value(document, "nodes", list)))
    _check_ranks(nodes, _value(document, "world_size", int))
    return LaunchPlan(
        run_path=_path(document, "path"),
        config=config,
        world_size=document["world_size"],
        backend=Backend(
            backend,
            _value(document, "backend_reason", str),
            cluster.ranks_per_node or 1,
            cluster.threads_per_rank or 1,
        ),
        nodes=nodes,
        files=tuple(_texts(document, "files").items()) if "files" in document else (),
        launcher=launcher,
        is_exclusive=_value(document, "exclusive", bool),
    )


def _node(entry: Any) -> NodePlan:
    name, argv = _value(entry, "name", str), _value(entry, "command", list)
    if not is_host_name(name):
        raise PlanFileError(f"name: {one_line(name, 60)!r} is no name of a node")
    if not argv or not all(isinstance(word, str) for word in argv):
        raise PlanFileError(f"command of {name}: expected a list of texts, with one at least")
    reasons = _texts(entry, "reasons")
    return NodePlan(
        name=name,
        node_rank=_value(entry, "node_rank", int),
        first_rank=_value(entry, "first_rank", int),
        local_ranks=_value(entry, "local_ranks", int),
        argv=tuple(argv),
        environment=tuple(
            EnvironmentVariable(key, value, reasons.get(key, "")) for key, value in _texts(entry, "environment").items()
        ),
        cwd=_path(entry, "cwd"),
        folder=_path(entry, "folder"),
        log_dir=_path(entry, "log_dir"),
        container=None if entry.get("container") is None else _value(entry, "container", str),
    )


def _check_ranks(nodes: tuple[NodePlan, ...], world_size: int) -> None:
    """Nodes are numbered, named once, and hold the ranks in order."""
    if not 1 <= len(nodes) <= MAX_NODES:
        raise PlanFileError(f"nodes: got {len(nodes)}, expected 1 to {MAX_NODES}")
    if len({node.name for node in nodes}) != len(nodes):
        raise PlanFileError("nodes: a name occurs twice")
    first = 0
    for number, node in enumerate(nodes):
        if (node.node_rank, node.first_rank) != (number, first) or node.local_ranks < 1:
            raise PlanFileError(f"nodes[{number}]: its ranks do not follow those of the node before")
        first += node.local_ranks
    if first != world_size:
        raise PlanFileError(f"world_size: got {world_size}, but the nodes have {first} ranks")


def _moved(plan: LaunchPlan, run_path: Path) -> LaunchPlan:
    """The plan of a run folder that lies at `run_path` now; folders of nodes that are not it stay what they were."""
    old = plan.run_path
    if old == str(run_path):
        return plan
    nodes = [
        replace(node, folder=str(run_path), log_dir=str(run_path / PurePosixPath(node.log_dir).relative_to(old)))
        if node.folder == old and PurePosixPath(node.log_dir).is_relative_to(old)
        else node
        for node in plan.nodes
    ]
    return replace(plan, run_path=str(run_path), nodes=tuple(nodes))


def _value(table: Any, name: str, kind: type[T]) -> T:
    """The value of that name, which must be of that kind."""
    value = table.get(name) if isinstance(table, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise PlanFileError(f"{name}: expected {_KINDS[kind]}, got {one_line(repr(value), 40)}")
    return value


def _path(table: Any, name: str) -> str:
    """An absolute path without `..`."""
    path = PurePosixPath(_value(table, name, str))
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise PlanFileError(f"{name}: {one_line(str(path), 100)!r} is no absolute path")
    return str(table[name])


def _texts(table: Any, name: str) -> dict[str, str]:
    values = _value(table, name, dict)
    if not all(isinstance(value, str) for value in values.values()):
        raise PlanFileError(f"{name}: expected a table of texts")
    return values
