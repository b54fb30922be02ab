"""`LaunchPlan`: everything a launch will do, as frozen values: the commands, their environment, the files.

Pure functions build it, `burst launch --dry-run` shows it, `cluster.control` runs that very value. RUN/launch.json
holds it for whoever controls the run later on.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.agent.messages import STOP_GRACE_S, Spec
from cluster.env.plan import EnvironmentVariable
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name
from engine.config.cluster import LAUNCHERS
from engine.config.errors import ConfigError
from engine.config.schema import to_plain
from engine.config.settings import RunConfig, config_from_dict, dump_config
from engine.runs.files import json_text, replace_file
from engine.runs.folder import RESOLVED_FILE, RunFolder, initial_state

TRAINER_MODULE = "engine.train"
PLAN_FILE = "launch.json"
PLAN_FORMAT = 1
# What a node far away needs of the run folder; with env/<node>.env, and run.json in a state of its own.
CONFIG_FILE = "config.yaml"
NODE_FILES = (CONFIG_FILE, RESOLVED_FILE, "memory_plan.json")


@dataclass(frozen=True)
class MachineFacts:
    """One machine as a launch plan needs it.

    hostname: names the log folder and the environment file.
    cores: CPU cores this process may use.
    gpus: CUDA devices that are visible; 0 without an NVIDIA driver.
    python: the interpreter that runs the ranks.
    cwd: the folder relative paths of the configuration start from.
    python_path: PYTHONPATH of the ranks, so that they find `engine`; None when burst is installed in site-packages.
    has_chosen_gpus: CUDA_VISIBLE_DEVICES says which of its GPUs to use.
    """

    hostname: str
    cores: int
    gpus: int
    python: str = sys.executable
    cwd: str = "."
    python_path: str | None = None
    has_chosen_gpus: bool = False


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
            **{name: getattr(self, name) for name in _PLAIN},
            "command": list(self.argv),
            "environment": {variable.name: variable.value for variable in self.environment},
            "reasons": {variable.name: variable.reason for variable in self.environment},
        }


_PLAIN = {
    **{"name": str, "node_rank": int, "first_rank": int, "local_ranks": int},
    **{"folder": str, "cwd": str, "log_dir": str, "container": str | None},
}


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. `files` are (name relative to the run folder, text) and complete the run folder.

    is_exclusive: no other run may hold the nodes.
    """

    run_path: str
    config: RunConfig  # as it was asked for, with backend, nodes, ranks and threads; another attempt begins with it
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
    def has_separate_folders(self) -> bool:
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
            "config": to_plain(self.config),
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
    """The files of a run folder that is not the launcher's. Its run.json says that a launcher has begun this run.

    Raises PlanFileError.
    """
    known, texts = dict(plan.files), {}
    for name in (*NODE_FILES, node.env_file):
        try:  # a plan that comes from launch.json has no texts, but they lie beside it
            texts[name] = known.get(name) or (Path(plan.run_path) / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # the ranks can do without it, or say what they miss
        except (OSError, ValueError) as error:
            text = f"cannot be read, but the nodes of the run need it: {one_line(str(error), 300)}"
            raise PlanFileError(f"{Path(plan.run_path) / name}: {text}") from error
    state = {**initial_state(), "state": "starting", "world_size": plan.world_size}
    return (*texts.items(), ("run.json", json_text(state)))


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


class PlanFileError(ClusterError):
    """What should be a launch plan is none."""


def read_launch_plan(run_path: Path) -> LaunchPlan:
    """Read the plan of the run in folder `run_path`, also after that folder was moved. Raises PlanFileError.

    Nodes that a scheduler grants later still have placeholder names; `cluster.control.runner.read_run_plan` has theirs.
    """
    return _moved(_read_plan(run_path), run_path.absolute())


def launch_folder(run_path: Path) -> Path:
    """Return the folder in which the run was launched, wherever its folder is now. Raises PlanFileError."""
    return Path(_read_plan(run_path).run_path)


def _read_plan(run_path: Path) -> LaunchPlan:
    path = run_path / PLAN_FILE
    try:
        return plan_from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise PlanFileError(f"{path}: there is none, so `burst launch` did not start this run") from error
    except (OSError, ValueError, RecursionError, PlanFileError) as error:
        raise PlanFileError(f"{path}: not a launch plan: {one_line(str(error), 300)}") from error


def write_plan_files(plan: LaunchPlan, run: RunFolder) -> None:
    """Lay the files of `plan` into the folder of a run that has one, each in the place of the one before it.

    Raises ClusterError.
    """
    for name, text in plan.files:
        path = run.path / name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            raise ClusterError(f"{path}: {error.strerror}") from error


_DOCUMENT = {
    **{"path": str, "world_size": int, "backend": str, "backend_reason": str, "launcher": str, "exclusive": bool},
    **{"config": dict, "nodes": list},
}


def plan_from_dict(document: Any) -> LaunchPlan:
    """The plan that `LaunchPlan.to_dict` wrote, `files` included if they are there. Raises PlanFileError."""
    try:
        if document["format"] != PLAN_FORMAT:
            raise ValueError(f"format: got {document['format']}, expected {PLAN_FORMAT}; made by another burst?")
        _check_kinds(document, _DOCUMENT)
        config = config_from_dict(document["config"])
        ranks, threads = config.cluster.ranks_per_node or 1, config.cluster.threads_per_rank or 1
        plan = LaunchPlan(
            run_path=document["path"],
            config=config,
            world_size=document["world_size"],
            backend=Backend(document["backend"], document["backend_reason"], ranks, threads),
            nodes=tuple(map(_node, document["nodes"])),
            files=tuple(document.get("files", {}).items()),
            launcher=document["launcher"],
            is_exclusive=document["exclusive"],
        )
        _check(plan)
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PlanFileError(one_line(f"{type(error).__name__}: {error}", 300)) from error
    return plan


def _node(entry: Mapping[str, Any]) -> NodePlan:
    _check_kinds(entry, {**_PLAIN, "command": list, "environment": dict, "reasons": dict})
    reasons = entry["reasons"]
    return NodePlan(
        argv=tuple(entry["command"]),
        environment=tuple(EnvironmentVariable(key, value, reasons[key]) for key, value in entry["environment"].items()),
        **{name: entry[name] for name in _PLAIN},
    )


def _check_kinds(record: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """ValueError for a value that is not of the kind of its name; a truth value is no number."""
    for name, kind in kinds.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool) is not (kind is bool):
            raise ValueError(f"{name}: {record[name]!r} cannot be that")


def _check(plan: LaunchPlan) -> None:
    """Nodes are numbered, named once, and hold the ranks in order; ValueError for what would go astray elsewhere."""
    first = 0
    for number, node in enumerate(plan.nodes):
        if (node.node_rank, node.first_rank) != (number, first) or node.local_ranks < 1:
            raise ValueError(f"nodes[{number}]: its ranks do not follow those of the node before")
        values = (value for variable in node.environment for value in (variable.value, variable.reason))
        if not is_host_name(node.name) or not all(isinstance(text, str) for text in (*node.argv, *values)):
            text = f"{node.name!r} is no name of a node, or its command or environment no texts"
            raise ValueError(f"nodes[{number}]: {text}")
        if not node.argv:
            raise ValueError(f"nodes[{number}]: no command")
        first += node.local_ranks
    if first != plan.world_size or len({node.name for node in plan.nodes}) != len(plan.nodes) or not plan.nodes:
        raise ValueError(f"world_size: got {plan.world_size}, but the nodes have {first} ranks, or a name occurs twice")
    for path in [plan.run_path, *(path for node in plan.nodes for path in (node.folder, node.cwd, node.log_dir))]:
        if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ValueError(f"{path!r} is no absolute path")
    if plan.launcher not in LAUNCHERS or plan.backend.name not in ("nccl", "gloo"):
        raise ValueError(f"launcher {plan.launcher!r} or backend {plan.backend.name!r} is not known here")


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
