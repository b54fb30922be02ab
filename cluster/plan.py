"""`LaunchPlan`: everything a launch will do, as frozen values: the commands, their environment, the files.

Pure functions build it, `burst launch --dry-run` shows it, `cluster.launch` runs that very value. Nothing here touches
the disk, starts a process or reads the clock.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.env.facts import EnvironmentVariable
from cluster.facts import NodeFacts
from engine.config import RunConfig, dump_config
from engine.errors import ConfigError
from engine.runs import RANK_LOGS_VARIABLE, RUN_ID_VARIABLE, RunFolder

TRAINER_MODULE = "engine.train"


@dataclass(frozen=True)
class Backend:
    """How the ranks of one node talk, and why."""

    name: str  # nccl or gloo
    reason: str
    local_ranks: int
    threads_per_rank: int


@dataclass(frozen=True)
class NodePlan:
    """What runs on one node: one command in folder `cwd` with `environment` on top of the inherited one."""

    hostname: str
    local_ranks: int
    argv: tuple[str, ...]
    environment: tuple[EnvironmentVariable, ...]
    cwd: str
    log_dir: str

    @property
    def env_file(self) -> str:
        """Name of the environment file, relative to the run folder."""
        return f"env/{Path(self.log_dir).name}.env"


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. `files` are (name relative to the run folder, text) and complete the run folder."""

    run_path: str
    config: RunConfig  # as the ranks will read it: backend, ranks and threads resolved
    world_size: int
    backend: Backend
    nodes: tuple[NodePlan, ...]
    files: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values; what `--dry-run --json` prints."""
        nodes = [
            {
                "hostname": node.hostname,
                "local_ranks": node.local_ranks,
                "cwd": node.cwd,
                "command": list(node.argv),
                "environment": {variable.name: variable.value for variable in node.environment},
            }
            for node in self.nodes
        ]
        return {
            "path": self.run_path,
            "run_id": Path(self.run_path).name,
            "exp": self.config.exp,
            "world_size": self.world_size,
            "backend": self.backend.name,
            "backend_reason": self.backend.reason,
            "nodes": nodes,
            "files": dict(self.files),
        }


def build_launch_plan(
    config: RunConfig, facts: NodeFacts, run_path: Path, *, module: str = TRAINER_MODULE
) -> LaunchPlan:
    """The plan to run `config` on the one machine described by `facts`, in the run folder `run_path` (not yet there).

    `module` is what torchrun starts on every rank with the path of config.yaml as its argument. Raises ConfigError when
    the backend that was asked for does not fit the machine.
    """
    _refuse_other_machines(config)
    backend = choose_backend(config, facts)
    cluster = replace(
        config.cluster,
        backend=backend.name,  # type: ignore[arg-type]
        ranks_per_node=backend.local_ranks,
        threads_per_rank=backend.threads_per_rank,
    )
    resolved = replace(config, cluster=cluster)
    node = _node_plan(facts, backend, run_path, module)
    files = (
        ("config.yaml", dump_config(resolved)),
        (node.env_file, environment_file(node)),
        ("plan.sh", plan_script(node, run_path)),
    )
    return LaunchPlan(str(run_path), resolved, backend.local_ranks, backend, (node,), files)


def _refuse_other_machines(config: RunConfig) -> None:
    """Better no run than one that quietly uses this machine in place of those that were named."""
    if config.cluster.nodes is not None:
        raise ConfigError(
            f"cluster.nodes={config.cluster.nodes}: a launch starts ranks on this machine only, so far. "
            "Add cluster=local to run here; check-nodes, env and image work on those nodes."
        )
    if config.cluster.container.runtime != "bare":
        raise ConfigError(
            "cluster.container.runtime=docker: a launch starts ranks outside of containers only, so far. "
            "Add cluster.container.runtime=bare, or run `burst launch` inside the image."
        )


def choose_backend(config: RunConfig, facts: NodeFacts) -> Backend:
    """NCCL if every local rank has a GPU of its own, else gloo on the CPU; the reason says which facts decided."""
    asked = config.cluster.backend
    ranks = config.cluster.ranks_per_node or (facts.gpus if facts.gpus and asked != "gloo" else 1)
    threads = config.cluster.threads_per_rank or max(1, facts.cores // ranks)
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
        reason = f"{gpus} for {ranks} rank{'' if ranks == 1 else 's'}"
    else:
        reason = f"on the CPU: {gpus} for {ranks} rank{'' if ranks == 1 else 's'}"
    return Backend(asked if asked != "auto" else "nccl" if enough else "gloo", reason, ranks, threads)


def environment_file(node: NodePlan) -> str:
    """The text of env/<node>.env: shell assignments, each below the reason for it."""
    lines = []
    for variable in node.environment:
        lines += [f"# {variable.reason}", f"{variable.name}={shlex.quote(variable.value)}"]
    return "\n".join(lines) + "\n"


def plan_script(node: NodePlan, run_path: Path) -> str:
    """The text of plan.sh: the same folder, environment and command as `burst launch`, without live progress."""
    return "\n".join(
        [
            "#!/bin/sh",
            f"# Run {run_path.name}: starts {node.local_ranks} ranks on {shlex.quote(node.hostname)}.",
            f"# Output of the ranks: {shlex.quote(node.log_dir)}",
            "set -eu",
            f"cd {shlex.quote(node.cwd)}",
            "set -a",
            f". {shlex.quote(str(run_path / node.env_file))}",
            "set +a",
            f"exec {shlex.join(node.argv)}",
            "",
        ]
    )


def _node_plan(facts: NodeFacts, backend: Backend, run_path: Path, module: str) -> NodePlan:
    log_dir = RunFolder(run_path).log_dir(facts.hostname)
    argv = (
        facts.python,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={backend.local_ranks}",
        "--max-restarts=0",
        # Port 0: the store binds any free port itself, so no other process can take it between plan and start.
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run_path.name}",
        "--local-addr=127.0.0.1",
        f"--log-dir={log_dir / 'torchrun'}",
        "-m",
        module,
        str(run_path / "config.yaml"),
    )
    return NodePlan(
        facts.hostname,
        backend.local_ranks,
        argv,
        _environment(facts, backend, run_path, log_dir),
        facts.cwd,
        str(log_dir),
    )


def _environment(facts: NodeFacts, backend: Backend, run_path: Path, log_dir: Path) -> tuple[EnvironmentVariable, ...]:
    per_rank = f"{facts.cores} cores for {backend.local_ranks} ranks"
    variables = [
        EnvironmentVariable(
            RUN_ID_VARIABLE, run_path.name, "marks every process of this run, so that all can be found"
        ),
        EnvironmentVariable(RANK_LOGS_VARIABLE, str(log_dir), "each rank writes its output to its own file there"),
        EnvironmentVariable("OMP_NUM_THREADS", str(backend.threads_per_rank), per_rank),
        EnvironmentVariable("PYTHONSAFEPATH", "1", "a folder named engine where burst is started must not be imported"),
        EnvironmentVariable("PYTHONFAULTHANDLER", "1", "a crash in native code leaves Python stacks in the log"),
    ]
    if facts.python_path:
        variables.append(EnvironmentVariable("PYTHONPATH", facts.python_path, "burst runs from a source tree"))
    if backend.name == "gloo":
        variables += [
            EnvironmentVariable("CUDA_VISIBLE_DEVICES", "", "the ranks of this run compute on the CPU"),
            EnvironmentVariable("GLOO_SOCKET_IFNAME", "lo", "all ranks are on this machine"),
        ]
    else:
        variables += [
            EnvironmentVariable("NCCL_SOCKET_IFNAME", "lo", "all ranks are on this machine"),
            EnvironmentVariable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a failed collective ends the rank, no hang"),
        ]
    return tuple(variables)
