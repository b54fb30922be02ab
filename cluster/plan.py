"""`LaunchPlan`: everything a launch will do, as frozen values: the commands, their environment, the files.

Pure functions build it, `burst launch --dry-run` shows it, `cluster.control` runs that very value. RUN/launch.json
holds it for whoever controls the run later on; it may be damaged or made by somebody else, so all in it is checked.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from cluster.agent.messages import STOP_GRACE_S, Spec
from cluster.env.facts import EnvironmentVariable
from cluster.errors import ClusterError
from cluster.facts import MachineFacts
from cluster.launch.runner import RUNNERS, runner_of
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, config_from_dict, config_to_dict, dump_config
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder, initial_state
from engine.runs.records import json_text

TRAINER_MODULE = "engine.train"
PLAN_FILE = "launch.json"
PLAN_FORMAT = 1
# What a node far away needs of the run folder; with env/<node>.env, and run.json in a state of its own.
CONFIG_FILE = "config.yaml"
NODE_FILES = (CONFIG_FILE, "memory_plan.json")


@dataclass(frozen=True)
class Backend:
    """How the ranks talk, why, and what one node has of them. threads_reason: on disk only beside the variable."""

    name: str  # nccl or gloo
    reason: str
    local_ranks: int
    threads_per_rank: int
    threads_reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class NodePlan:
    """What runs on one node: one command in folder `cwd` with `environment` on top of the node's own.

    name: of the node in files and on the screen; not always its host name. folder: the run folder on that node,
    absolute. log_dir: where its ranks write there. container: the name of the one that argv starts; None: bare.
    """

    name: str
    node_rank: int
    first_rank: int
    local_ranks: int
    argv: tuple[str, ...]
    environment: tuple[EnvironmentVariable, ...]
    cwd: str
    folder: str
    log_dir: str
    container: str | None = None

    @property
    def ranks(self) -> range:
        """The numbers of its ranks."""
        return range(self.first_rank, self.first_rank + self.local_ranks)

    @property
    def env_file(self) -> str:
        """Name of the environment file, relative to the run folder."""
        return f"env/{Path(self.log_dir).name}.env"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "node_rank": self.node_rank,
            "first_rank": self.first_rank,
            "local_ranks": self.local_ranks,
            "folder": self.folder,
            "cwd": self.cwd,
            "log_dir": self.log_dir,
            "container": self.container,
            "command": list(self.argv),
            "environment": {variable.name: variable.value for variable in self.environment},
            "reasons": {variable.name: variable.reason for variable in self.environment},
        }


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. `files` are (name relative to the run folder, text) and complete the run folder.

    is_exclusive: no other run may hold the nodes.
    """

    run_path: str
    config: RunConfig  # as the ranks will read it: backend, nodes, ranks and threads resolved
    world_size: int
    backend: Backend
    nodes: tuple[NodePlan, ...]
    files: tuple[tuple[str, str], ...]
    launcher: str = "local"
    is_exclusive: bool = False

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return Path(self.run_path).name

    @property
    def has_own_folders(self) -> bool:
        """Whether the nodes keep the run in folders that this machine does not see."""
        return any(node.folder != self.run_path for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values; what `--dry-run --json` prints."""
        return {
            "format": PLAN_FORMAT,
            "path": self.run_path,
            "run_id": self.run_id,
            "exp": self.config.exp,
            "launcher": self.launcher,
            "world_size": self.world_size,
            "backend": self.backend.name,
            "backend_reason": self.backend.reason,
            "exclusive": self.is_exclusive,
            "nodes": [node.to_dict() for node in self.nodes],
            "config": config_to_dict(self.config),
            "files": dict(self.files),
        }


def with_files(plan: LaunchPlan, *files: tuple[str, str]) -> LaunchPlan:
    """`plan` with these files, each in the place of one of its name; launch.json says again what the plan is."""
    names = {name for name, _ in files} | {PLAN_FILE}
    plan = replace(plan, files=(*(file for file in plan.files if file[0] not in names), *files))
    return replace(plan, files=(*plan.files, (PLAN_FILE, plan_text(plan))))


def with_exclusive(plan: LaunchPlan, *, exclusive: bool) -> LaunchPlan:
    """`plan` for nodes that no other run may hold, or that may be shared."""
    return with_files(replace(plan, is_exclusive=exclusive))


def plan_text(plan: LaunchPlan) -> str:
    """The content of launch.json: the plan without the texts of its files, which lie beside it."""
    return json_text({key: value for key, value in plan.to_dict().items() if key != "files"})


def roots_of(plan: LaunchPlan) -> dict[str, str]:
    """Where each node of a run over SSH keeps the checkpoints of the run; may begin with ~/."""
    folder = plan.config.train.checkpoint.folder
    if folder is not None:
        return {node.name: f"{folder.rstrip('/')}/{plan.run_id}" for node in plan.nodes}
    return {node.name: f"{node.folder}/checkpoints" for node in plan.nodes}


def node_spec(plan: LaunchPlan, node: NodePlan, *, lease_s: float | None) -> Spec:
    """What the supervisor of `node` is told. lease_s: None: the node goes on without a launcher."""
    container, checkpoint = plan.config.cluster.container, plan.config.train.checkpoint
    return Spec(
        run_id=plan.run_id,
        node=node.name,
        node_rank=node.node_rank,
        num_nodes=len(plan.nodes),
        first_rank=node.first_rank,
        local_ranks=node.local_ranks,
        folder=node.folder,
        argv=node.argv,
        cwd=node.cwd,
        environment={variable.name: variable.value for variable in node.environment},
        files=() if node.folder == plan.run_path else _node_files(plan, node),
        container=node.container,
        engine=tuple(shlex.split(container.command)),
        lease_s=lease_s,
        stop_grace_s=checkpoint.stop_grace_s if checkpoint.is_on else STOP_GRACE_S,
        exclusive=plan.is_exclusive,
    )


def _node_files(plan: LaunchPlan, node: NodePlan) -> tuple[tuple[str, str], ...]:
    """The files of a run folder that is not the launcher's. Its run.json says that a launcher has begun this run."""
    wanted = {*NODE_FILES, node.env_file}
    state = {**initial_state(), "state": "starting", "world_size": plan.world_size}
    return (*(file for file in plan.files if file[0] in wanted), ("run.json", json_text(state)))


def assemble_plan(
    launcher: str,
    config: RunConfig,
    run_path: Path,
    nodes: Sequence[NodePlan],
    backend: Backend,
    *files: tuple[str, str],
    is_exclusive: bool = True,
) -> LaunchPlan:
    """The plan of `nodes`, whose ranks read `config`; files: beside that of the configuration."""
    files = ((CONFIG_FILE, dump_config(config)), *files)
    world_size = backend.local_ranks * len(nodes)
    plan = LaunchPlan(str(run_path), config, world_size, backend, tuple(nodes), files, launcher, is_exclusive)
    return with_files(plan)


def with_ranks(config: RunConfig, facts: MachineFacts, **cluster: Any) -> tuple[RunConfig, Backend]:
    """(`config` with the ranks, threads and backend of nodes like `facts`, and with settings `cluster`; the backend).

    Raises ConfigError when the backend that was asked for does not fit.
    """
    backend = choose_backend(config, facts)
    found = {
        "backend": backend.name,
        "ranks_per_node": backend.local_ranks,
        "threads_per_rank": backend.threads_per_rank,
    }
    return replace(config, cluster=replace(config.cluster, **{**found, **cluster})), backend


def choose_backend(config: RunConfig, facts: MachineFacts) -> Backend:
    """NCCL if every local rank has a GPU of its own, else gloo on the CPU; the reason says which facts decided."""
    asked = config.cluster.backend
    ranks = config.cluster.ranks_per_node or (facts.gpus if facts.gpus and asked != "gloo" else 1)
    asked_threads = config.cluster.threads_per_rank
    threads = asked_threads or max(1, facts.cores // ranks)
    for_ranks = f"{ranks} rank{'' if ranks == 1 else 's'}"
    why_threads = f"cluster.threads_per_rank={threads}" if asked_threads else f"{facts.cores} cores for {for_ranks}"
    gpus = f"{facts.gpus} visible GPU{'' if facts.gpus == 1 else 's'}"
    enough = facts.gpus >= ranks
    if asked == "nccl" and not enough:
        raise ConfigError(
            f"cluster.backend=nccl needs one GPU per rank, but {facts.hostname} has {gpus} for {ranks} ranks. "
            f"Set cluster.ranks_per_node to at most the number of GPUs, or cluster.backend=gloo to run on the CPU."
        )
    if asked != "auto":
        reason = f"cluster.backend={asked}"
    elif enough:
        reason = f"{gpus} for {for_ranks}"
    else:
        reason = f"on the CPU: {gpus} for {for_ranks}"
    name = asked if asked != "auto" else "nccl" if enough else "gloo"
    return Backend(name, reason, ranks, threads, why_threads)


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
