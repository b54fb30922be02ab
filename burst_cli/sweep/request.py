"""From the words after `burst sweep` to its plan and its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burst_cli.compose import compose, sweep_axes
from burst_cli.plan.memory_check import MemoryPlanner
from burst_cli.runs.read import run_record
from burst_cli.sweep.estimate import LaunchJudge, measured_runs
from burst_cli.sweep.grammar import Axis, cells_of, check_axes
from burst_cli.sweep.plan import SweepPlan, build_sweep, check_legal
from burst_cli.sweep.runner import Lane
from burst_cli.sweep.store import SweepFolder, sweeps_dir
from cluster.facts import probe_local_node
from cluster.launch.runner import runner_for
from cluster.ssh.nodes import parse_nodes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.folder import list_runs


@dataclass(frozen=True)
class SweepRequest:
    """What was typed. force: also cells that are expected not to fit. name: begins the id of the sweep."""

    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    runs_dir: Path
    parallel: int = 1
    force: bool = False
    skip_illegal: bool = False
    name: str | None = None

    @property
    def launch_arguments(self) -> tuple[str, ...]:
        """Options that every launch of a cell gets."""
        folders = [word for folder in self.config_dirs for word in ("--config-dir", str(folder.absolute()))]
        return (*folders, *(("--force",) if self.force else ()))


def plan_sweep(request: SweepRequest) -> tuple[SweepPlan, tuple[Lane, ...]]:
    """The checked plan and where its cells run. Raises ConfigError that names every mistake; nothing was created."""
    axes = sweep_axes(request.overrides, request.config_dirs)
    check_axes(axes)
    facts = probe_local_node()
    lanes = _lanes(request, axes, facts.gpus)
    on_first_lane = lanes[0].overrides  # all lanes have as many nodes

    def compose_cell(words: Sequence[str]) -> RunConfig:
        return compose([*words, *on_first_lane], request.config_dirs).config

    measured = measured_runs(run_record(run) for run in list_runs(request.runs_dir))
    judge = LaunchJudge(facts, MemoryPlanner(), measured, request.force)
    plan = build_sweep(
        request.overrides, axes, compose_cell, judge, name=request.name, recorded=lambda name: _recorded(request, name)
    )
    check_legal(plan, skip_illegal=request.skip_illegal)
    return plan, lanes


def _recorded(request: SweepRequest, sweep_id: str) -> dict[str, str | None]:
    """What an earlier command of the same sweep found out; with --force nothing is held against a cell."""
    folder = SweepFolder(sweeps_dir(request.runs_dir) / sweep_id)
    if request.force or not (folder.path / "sweep.json").exists():
        return {}
    return {str(cell["id"]): cell.get("short_of_memory") for cell in folder.read()["cells"]}


def _lanes(request: SweepRequest, axes: list[Axis], gpus: int) -> tuple[Lane, ...]:
    """From the configuration of the first cell that composes; the nodes of a sweep are the same in all cells."""
    if request.parallel == 1:
        return (Lane("one"),)
    swept = [axis.key for axis in axes if axis.is_sweep and axis.key.startswith("cluster")]
    if swept:
        raise ConfigError(f"--parallel {request.parallel}: {swept[0]} differs between cells; leave --parallel out")
    config = _first_legal(request, axes)
    if config is None:
        return (Lane("one"),)  # no cell composes, which is about to be said
    nodes, runner = config.cluster.nodes, runner_for(config.cluster)
    names = parse_nodes(nodes, "cluster.nodes").names if nodes is not None and not runner.is_here else ()
    return choose_lanes(names, request.parallel, gpus=gpus, is_queued=runner.is_queued)


def _first_legal(request: SweepRequest, axes: list[Axis]) -> RunConfig | None:
    for words, _ in cells_of(axes):
        try:
            return compose(words, request.config_dirs).config
        except ConfigError:
            continue
    return None


def choose_lanes(names: Sequence[str], parallel: int, *, gpus: int = 0, is_queued: bool = False) -> tuple[Lane, ...]:
    """Where cells run at the same time: on disjoint sets of neighbours of the nodes `names`, of equal size.

    Without names on this machine, or as jobs of a scheduler. Raises ConfigError where that cannot be.
    """
    if names:
        if parallel < 1 or len(names) % parallel:
            legal = ", ".join(str(number) for number in range(1, len(names) + 1) if len(names) % number == 0)
            raise ConfigError(
                f"--parallel {parallel}: {len(names)} nodes cannot be divided into equal parts; legal values: {legal}"
            )
        size = len(names) // parallel
        parts = (",".join(names[first : first + size]) for first in range(0, len(names), size))
        return tuple(Lane(part, (f"cluster.nodes='{part}'",)) for part in parts)
    if parallel > 1 and gpus and not is_queued:
        raise ConfigError(
            f"--parallel {parallel}: cells at the same time would share the {gpus} GPUs of this machine; "
            "name nodes with cluster.nodes, or leave it out"
        )
    where = "the queue" if is_queued else "this machine"
    return tuple(Lane(where if parallel == 1 else f"{where} {number}") for number in range(1, parallel + 1))
