"""From the words after `burst sweep` to its plan and its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burst_cli.compose import compose, sweep_axes
from burst_cli.memory_check import MemoryPlanner
from burst_cli.run_records import run_record
from burst_cli.sweep.estimate import measured_runs
from burst_cli.sweep.grammar import Axis, cell_overrides, check_axes
from burst_cli.sweep.judge import LaunchJudge, is_local
from burst_cli.sweep.lanes import choose_lanes
from burst_cli.sweep.plan import SweepPlan, build_sweep, refuse_illegal, skipping_illegal, sweeps_dir
from burst_cli.sweep.runner import Lane
from burst_cli.sweep.store import SweepFolder
from cluster.access.nodes import parse_nodes
from cluster.facts import probe_local_node
from engine.config import RunConfig
from engine.errors import ConfigError
from engine.runs import list_runs


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
    if request.skip_illegal:
        return skipping_illegal(plan), lanes
    refuse_illegal(plan)
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
    nodes = config.cluster.nodes
    names = parse_nodes(nodes, "cluster.nodes").names if nodes is not None and not is_local(config) else ()
    return choose_lanes(names, request.parallel, gpus=gpus, is_slurm=config.cluster.launcher == "slurm")


def _first_legal(request: SweepRequest, axes: list[Axis]) -> RunConfig | None:
    for words in cell_overrides(axes):
        try:
            return compose(words, request.config_dirs).config
        except ConfigError:
            continue
    return None
