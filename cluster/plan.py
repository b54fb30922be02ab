"""`LaunchPlan`: everything a launch will do, as frozen values: the commands, their environment, the files.

Pure functions build it, `burst launch --dry-run` shows it, `cluster.control` runs that very value. Nothing here touches
the disk or starts a process. RUN/launch.json holds it for whoever controls the run later on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.agent.messages import STOP_GRACE_S, Spec
from cluster.env.facts import EnvironmentVariable
from cluster.facts import MachineFacts
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, config_to_dict, dump_config
from engine.runs.folder import initial_state
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
