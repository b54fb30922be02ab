"""A sweep as it is typed becomes axes, cells and `SweepPlan`: all of it checked before the first cell starts.

`burst_cli.compose` parses, because only it may know Hydra.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burst_cli.overrides import MOST_CELLS, Axis
from burst_cli.plan.memory_check import Estimate, MemoryPlanner, check_memory, estimate
from burst_cli.render import grouped
from burst_cli.runs.starts import earlier_start_s
from cluster.control.runner import runner_for
from cluster.plan import MachineFacts, with_ranks
from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig
from engine.resolve.attention import check_attention
from engine.resolve.degrees import sequence_topology, world_topology
from engine.resolve.legality import check_run
from engine.resolve.run import ResolvedRun
from engine.runs.record import config_facts, config_fingerprint

_ID_DIGITS = 10
_MOST_TITLES = 3


def check_axes(axes: Sequence[Axis]) -> None:
    """Raise ConfigError for a sweep with a key twice, an axis without values, no axis at all, or too many cells."""
    keys = [axis.key for axis in axes]
    problems = [
        f"{key} is given {keys.count(key)} times; a sweep takes each setting once"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    ]
    problems += [f"{axis.key}: no value is left of this list; nothing would run" for axis in axes if not axis.values]
    if not any(axis.is_sweep for axis in axes):
        problems.append(
            "no setting has several values, so this is one run: use `burst launch`, or give a list such as "
            "train.seq_len=2048,4096 or attention=burst,ring"
        )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_CELLS:
        problems.append(f"{count} cells: a sweep has at most {MOST_CELLS}; leave out values or split it")
    if problems:
        raise ConfigError(problems)


def cells_of(axes: Sequence[Axis]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """(overrides, {swept setting: value}) of every cell, the last axis changing fastest, as nested loops would."""
    cells = []
    for chosen in itertools.product(*(zip(axis.overrides, axis.values, strict=True) for axis in axes)):
        values = {axis.key: value for axis, (_, value) in zip(axes, chosen, strict=True) if axis.is_sweep}
        cells.append((tuple(override for override, _ in chosen), values))
    return cells


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    cell_id: of the configuration that these overrides compose, so the same run has the same id in every sweep.
    values: of the swept settings, as typed. problems: why it cannot run at all. short_of_memory: why it is expected not
    to fit, a result of its own; estimate: what it is expected to take, None: nothing is known.
    """

    cell_id: str
    overrides: tuple[str, ...]
    values: dict[str, str]
    config: RunConfig | None = None
    problems: tuple[str, ...] = ()
    short_of_memory: str | None = None
    estimate: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "id": self.cell_id,
            "exp": self.config.exp if self.config is not None else None,
            "overrides": list(self.overrides),
            "values": dict(self.values),
            "facts": {} if self.config is None else config_facts(self.config),
            "problems": list(self.problems),
            "short_of_memory": self.short_of_memory,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }


def title_of(values: Mapping[str, str]) -> str:
    """The swept settings of a cell in one line: `train.seq_len=4096 attention=ring`."""
    return " ".join(f"{key}={value}" for key, value in values.items())


@dataclass(frozen=True)
class SweepPlan:
    """All cells in the order in which they run. sweep_id follows from the cells: typed again, it is found again."""

    sweep_id: str
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def keys(self) -> list[str]:
        """The swept settings."""
        return list(dict.fromkeys(key for cell in self.cells for key in cell.values))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: what --dry-run --json prints."""
        cells = [cell.to_dict() for cell in self.cells]
        return {"sweep_id": self.sweep_id, "overrides": list(self.overrides), "cells": cells}


Compose = Callable[[Sequence[str]], RunConfig]
# What an earlier command found out about the memory of the cells of a sweep, by cell id; empty for a new sweep.
Recorded = Callable[[str], Mapping[str, str | None]]


def build_sweep(
    overrides: Sequence[str],
    axes: Sequence[Axis],
    compose: Compose,
    judge: LaunchJudge,
    *,
    name: str | None = None,
    recorded: Recorded = lambda sweep_id: {},
) -> SweepPlan:
    """The plan of the sweep that `axes` span; every cell composed and judged, none started.

    Cells that compose to the same configuration are one. Raises ConfigError when the axes themselves make no sense.
    """
    check_axes(axes)
    cells: dict[str, Cell] = {}
    for words, values in cells_of(axes):
        cell = _resolved(words, values, compose, judge)
        cells.setdefault(cell.cell_id, cell)
    digest = _digest(sorted(cells))[:8]
    sweep_id = f"{name}-{digest}" if name else digest
    known = recorded(sweep_id)
    judged = tuple(_judged(cell, judge, known) for cell in cells.values())
    return SweepPlan(sweep_id, tuple(overrides), judged)


def check_legal(plan: SweepPlan, *, skip_illegal: bool) -> None:
    """Raise ConfigError that names every cell that cannot run, each with all its problems, equal ones said once.

    skip_illegal: only when no other cell is left; illegal ones stay in the plan as results.
    """
    illegal = [cell for cell in plan.cells if cell.problems]
    if not illegal or (skip_illegal and len(illegal) < len(plan.cells)):
        return
    texts = []
    for problem, titles in grouped((one, title_of(cell.values)) for cell in illegal for one in cell.problems).items():
        more = len(titles) - _MOST_TITLES
        texts.append(f"{problem}  [{', '.join(titles[:_MOST_TITLES])}{f' and {more} more' if more > 0 else ''}]")
    count = f"{len(illegal)} of {len(plan.cells)} cells cannot run"
    raise ConfigError([*texts, f"{count}; nothing was started. Leave these values out, or add --skip-illegal"])


def _resolved(words: tuple[str, ...], values: dict[str, str], compose: Compose, judge: LaunchJudge) -> Cell:
    """A cell with its configuration, or with the reasons why it has none."""
    try:
        config = compose(words)
    except ConfigError as error:
        return Cell(_digest(words)[:_ID_DIGITS], words, values, problems=error.problems)
    cell = Cell(config_fingerprint(config)[:_ID_DIGITS], words, values, config)
    try:
        return replace(cell, config=judge.settle(config))
    except ConfigError as error:
        return replace(cell, problems=error.problems)


def _judged(cell: Cell, judge: LaunchJudge, known: Mapping[str, str | None]) -> Cell:
    """A cell that can run, with what it takes; predicting memory takes seconds, so it is done once per sweep."""
    if cell.problems or cell.config is None:
        return cell
    is_known = cell.cell_id in known
    shortage, estimate = judge.expect(cell.config, is_known=is_known)
    return replace(cell, short_of_memory=known[cell.cell_id] if is_known else shortage, estimate=estimate)


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def total(estimates: Sequence[Estimate | None], parallel: int) -> tuple[float, float] | None:
    """(wall-clock seconds, device hours) of all, `parallel` at a time; None unless every one is known."""
    known = [one for one in estimates if one is not None]
    if not known or len(known) < len(estimates):
        return None
    lanes = [0.0] * parallel
    for one in known:  # each cell begins where a lane is free first, as the runner does it
        lanes[lanes.index(min(lanes))] += one.seconds
    return max(lanes), sum(one.device_hours for one in known)


@dataclass(frozen=True)
class LaunchJudge:
    """What judges cells as a launch would. facts: of this machine; nodes elsewhere are asked when a cell starts."""

    facts: MachineFacts
    planner: MemoryPlanner
    force: bool = False
    runs_dir: Path | None = None  # whose runs say how long a start takes

    def settle(self, config: RunConfig) -> RunConfig:
        """With ranks and backend where this machine runs it; checked with its number of ranks, if that is known."""
        if runner_for(config.cluster).is_here:
            config, _ = with_ranks(config, self.facts)
        check_run(config)
        if config.cluster.world_size is not None:
            check_attention(config, sequence_topology(config, world_topology(config)))
        return config

    def expect(self, config: RunConfig, *, is_known: bool = False) -> tuple[str | None, Estimate | None]:
        """(the first sentence of what a launch would refuse for want of memory, what it takes), as far as is known.

        is_known: the first is, so memory is not predicted again; a policy that costs nothing then stands for that which
        memory=auto would choose. What machines elsewhere have is not known yet.
        """
        if config.cluster.world_size is None:
            return None, None
        predicts = runner_for(config.cluster).is_here and not (is_known or self.force)
        try:
            run = self.planner.resolve(config, search=predicts)
            shortage = self._shortage(run) if predicts else None
        except (ConfigError, RunError):  # the launch of the cell says it better, and it is that cell's result
            return None, None
        start_s = None
        if self.runs_dir is not None:
            start_s = earlier_start_s(self.runs_dir, config.exp, config.cluster.world_size)
        return shortage, estimate(run, self.planner.predict_time(run), start_s)

    def _shortage(self, run: ResolvedRun) -> str | None:
        problems = check_memory(run, self.planner, force=True).problems
        return problems[0] if problems else None
