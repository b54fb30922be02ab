"""From the words after `burst launch` to a plan that may be carried out: which launcher, which nodes, does it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from burst_cli import render
from burst_cli.compose import compose
from burst_cli.options import RUNS_DIR
from burst_cli.plan.memory_check import MemoryCheck, MemoryPlanner, check_memory, group_topology, with_memory
from cluster.launch.runner import Asked, Survey, runner_for
from cluster.plan import LaunchPlan, with_exclusive
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import Hardware
from engine.planning.sequence.layers import check_attention
from engine.planning.time.machine import find_machine, machine_fields
from engine.runs.folder import check_writable, new_run_path


@dataclass(frozen=True)
class LaunchRequest:
    """What was given on the command line. run_path: the run folder to use, in place of a new one in `runs_dir`.

    base: the configuration that the overrides change, in place of that of the files.
    """

    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    runs_dir: Path = RUNS_DIR
    run_path: Path | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    force: bool = False
    skip_checks: bool = False
    dry_run: bool = False
    base: RunConfig | None = None


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that was found fit. overrides: those that spell this configuration, nodes included. survey: of the
    machines, which may still lack what the plan starts there. notes: what a person should know before."""

    plan: LaunchPlan
    memory: MemoryCheck
    overrides: tuple[str, ...]
    survey: Survey
    notes: tuple[str, ...] = ()


def prepare_launch(request: LaunchRequest) -> PreparedLaunch:
    """The launch that `request` means. Nothing is created anywhere.

    Raises ConfigError for what was asked for, UnfitNodesError for nodes that cannot do it.
    """
    nodes = _named_nodes(request)
    composed = compose((*request.overrides, *_node_overrides(nodes)), request.config_dirs, request.base)
    run_path = _run_path(request, composed.config.exp)
    if not request.dry_run:
        check_writable(run_path)  # before anybody is asked
    runner = runner_for(composed.config.cluster)
    health = not (request.skip_checks or request.dry_run)
    asked = Asked(nodes, request.overrides, request.force, request.dry_run, health, render.stderr().status)
    survey = runner.survey(composed.config, asked)
    resolved = survey.plan(survey.config, run_path).config
    memory = settle_memory(request, resolved, survey.hardware)
    plan = with_memory(survey.plan(with_policy(survey.config, memory), run_path), memory)
    if request.force:
        plan = with_exclusive(plan, exclusive=False)
    # Of a scheduler's nodes nothing is known yet that would tell how fast they are.
    notes = () if runner.is_queued else time_notes(request, memory.config, survey.hardware)
    return PreparedLaunch(survey.complete(plan), memory, composed.overrides, survey, composed.notes + notes)


def settle_memory(request: LaunchRequest, config: RunConfig, hardware: Hardware | None = None) -> MemoryCheck:
    """The check of memory, with memory=auto settled, of a configuration that knows its ranks.

    hardware: of the node with least; None: this machine's. Raises ConfigError for rules that only now apply.
    """
    check_config(config)  # once more: the number of ranks is known only now
    check_attention(config, group_topology(config))
    planner = MemoryPlanner(hardware)
    return check_memory(planner.settle_attention(config), planner, force=request.force)


def with_policy(config: RunConfig, memory: MemoryCheck) -> RunConfig:
    """`config` with the policy of memory that was chosen. attention=auto stays: the ranks settle it themselves.

    But not by a measured profile, which lies here: they get the method, and its figures.
    """
    settled, given = replace(config, memory=memory.config.memory), config.cluster.machine
    if not given.name.endswith(".json"):
        return settled
    machine = find_machine(given.name)
    rates = tuple(f"{name}={float(getattr(machine, name))!r}" for name in (*machine_fields(), "shared_nic"))
    measured = replace(given, name="cpu" if machine.is_cpu else "auto", rates=(*rates, *given.rates))
    cluster = replace(config.cluster, machine=measured)
    return replace(settled, attention=memory.config.attention, cluster=cluster)


def time_notes(request: LaunchRequest, config: RunConfig, hardware: Hardware | None) -> tuple[str, ...]:
    """What to say of the time that the settled `config` takes. Raises ConfigError where it is hopeless on CPUs."""
    from burst_cli.launch.timing import expected_time

    return expected_time(config, MemoryPlanner(hardware), force=request.force or request.dry_run)


def _run_path(request: LaunchRequest, exp: str) -> Path:
    if request.run_path is None:
        return new_run_path(request.runs_dir, exp)
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
