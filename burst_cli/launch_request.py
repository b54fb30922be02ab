"""From the words after `burst launch` to a plan that may be carried out: which launcher, which nodes, does it fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from burst_cli.compose import Composed, compose
from burst_cli.memory_check import MemoryCheck, MemoryPlanner, check_memory, with_memory
from burst_cli.plan_candidates import group_topology
from cluster.facts import NodeFacts, probe_local_node
from cluster.plan import LaunchPlan, build_launch_plan, with_exclusive
from engine.config.errors import ConfigError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import Hardware
from engine.planning.methods.auto import check_attention
from engine.runs.folder import default_runs_dir, new_run_path

if TYPE_CHECKING:
    from burst_cli.launch_fleet import ReadyFleet


@dataclass(frozen=True)
class LaunchRequest:
    """What was given on the command line. run_path: the run folder to use, in place of a new one in `runs_dir`.

    base: the configuration that the overrides change, in place of that of the files.
    """

    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    runs_dir: Path | None = None
    run_path: Path | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    force: bool = False
    skip_checks: bool = False
    dry_run: bool = False
    base: RunConfig | None = None


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that was found fit. overrides: those that spell this configuration, nodes included. fleet: nodes that
    still lack what the plan starts there; None: there are none such. notes: what a person should know before."""

    plan: LaunchPlan
    memory: MemoryCheck
    overrides: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    fleet: ReadyFleet | None = None
    notes: tuple[str, ...] = ()


def prepare_launch(request: LaunchRequest) -> PreparedLaunch:
    """The launch that `request` means. Nothing is created anywhere.

    Raises ConfigError for what was asked for, UnfitNodesError for nodes that cannot do it.
    """
    nodes = _named_nodes(request)
    composed = compose((*request.overrides, *_node_overrides(nodes)), request.config_dirs, request.base)
    config = composed.config
    run_path = _run_path(request, config.exp)
    launcher = choose_launcher(config)
    if launcher == "ssh":
        from burst_cli.launch_fleet import prepare_fleet

        return prepare_fleet(request, composed, run_path, nodes)
    return _prepare_here(request, composed, run_path, launcher)


def choose_launcher(config: RunConfig) -> str:
    """local, ssh or slurm: cluster.launcher, and for auto ssh where nodes are named. Raises ConfigError."""
    cluster = config.cluster
    by_nodes = "local" if cluster.nodes is None else "ssh"
    launcher = by_nodes if cluster.launcher == "auto" else cluster.launcher
    if launcher == "local" and (cluster.num_nodes or 1) > 1:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}, but no nodes are named: give --hosts node[1-4], --hostfile FILE "
            "or cluster=NAME (a file in conf/cluster/ with `nodes:`), or cluster.launcher=slurm"
        )
    if launcher == "ssh" and cluster.nodes is None:
        raise ConfigError(
            "cluster.launcher=ssh, but no nodes are named: give --hosts node[1-4], --hostfile FILE or cluster=NAME (a "
            "file in conf/cluster/ with `nodes:`); `burst testbed up` makes nodes to try things on"
        )
    if launcher == "local" and cluster.container.runtime != "bare":
        raise ConfigError(
            f"cluster.container.runtime={cluster.container.runtime}: on this machine itself, ranks start outside of "
            "containers only. Add cluster.container.runtime=bare, run `burst launch` inside the image, or name this "
            "machine with --hosts, so that it is reached by SSH"
        )
    return launcher


def settle_memory(request: LaunchRequest, config: RunConfig, hardware: Hardware | None = None) -> MemoryCheck:
    """The check of memory, with memory=auto settled, of a configuration that knows its ranks.

    hardware: of the node with least; None: this machine's. Raises ConfigError for rules that only now apply.
    """
    check_config(config)  # once more: the number of ranks is known only now
    check_attention(config, group_topology(config))
    planner = MemoryPlanner(hardware)
    return check_memory(planner.settle_attention(config), planner, force=request.force)


def with_policy(config: RunConfig, memory: MemoryCheck) -> RunConfig:
    """`config` with the policy of memory that was chosen. attention=auto stays: the ranks settle it themselves."""
    return replace(config, memory=memory.config.memory)


def time_notes(
    request: LaunchRequest, config: RunConfig, facts: NodeFacts, hardware: Hardware | None = None
) -> tuple[str, ...]:
    """What to say of the time that the settled `config` takes. Raises ConfigError where it is hopeless on CPUs."""
    from burst_cli.launch_time import expected_time, newest_measured
    from burst_cli.sweep.estimate import LaunchJudge

    planner = MemoryPlanner(hardware)
    measured = newest_measured(request.runs_dir or default_runs_dir())
    return expected_time(config, LaunchJudge(facts, planner, measured, request.force or request.dry_run))


def _prepare_here(request: LaunchRequest, composed: Composed, run_path: Path, launcher: str) -> PreparedLaunch:
    """A launch on this machine, or through the Slurm that it submits to."""
    facts = _local_facts(composed.config)
    build = build_launch_plan if launcher == "local" else _slurm_builder(composed.config, dry_run=request.dry_run)
    memory = settle_memory(request, build(composed.config, facts, run_path).config)
    plan = with_memory(build(with_policy(composed.config, memory), facts, run_path), memory)
    if request.force:
        plan = with_exclusive(plan, exclusive=False)
    notes = composed.notes + (time_notes(request, memory.config, facts) if launcher == "local" else ())
    return PreparedLaunch(plan, memory, composed.overrides, notes=notes)


def _slurm_builder(config: RunConfig, *, dry_run: bool) -> Callable[[RunConfig, NodeFacts, Path], LaunchPlan]:
    """With the GPUs of Slurm's partition where they count. Raises SlurmError; a rehearsal does without Slurm."""
    from cluster.slurm.client import SlurmClient, SlurmError
    from cluster.slurm.plan import asks_partition, build_slurm_plan

    client, gpus = SlurmClient(), 0
    try:
        if asks_partition(config, os.environ):
            gpus = client.partition_gpus(config.cluster.slurm.partition)
        elif not dry_run:
            client.ping()
    except SlurmError:
        if not dry_run:
            raise
    return partial(build_slurm_plan, partition_gpus=gpus)


def _local_facts(config: RunConfig) -> NodeFacts:
    facts = probe_local_node()
    python = config.cluster.python
    return facts if python is None else replace(facts, python=str(Path(python).expanduser()))


def _run_path(request: LaunchRequest, exp: str) -> Path:
    if request.run_path is None:
        return new_run_path(request.runs_dir or default_runs_dir(), exp)
    return request.run_path.absolute()


def _named_nodes(request: LaunchRequest) -> tuple[str, ...] | None:
    """The nodes of --hosts or --hostfile in their order; None without these."""
    if request.hosts is None and request.hostfile is None:
        return None
    from burst_cli.targets import select_nodes

    return select_nodes(RunConfig(), hosts=request.hosts, hostfile=request.hostfile).names


def _node_overrides(nodes: tuple[str, ...] | None) -> tuple[str, ...]:
    """The settings that mean these nodes, so that the record of a run says which they were."""
    if nodes is None:
        return ()
    from cluster.ssh.nodes import fold_nodes

    return (f"cluster.nodes='{fold_nodes(nodes)}'",)
