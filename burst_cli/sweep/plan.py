"""`SweepPlan`: every cell of a sweep as a value, composed and checked before the first one starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from burst_cli.figures import grouped
from burst_cli.sweep.grammar import Axis, cells_of, check_axes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, config_fingerprint
from engine.runs.summary import config_facts

if TYPE_CHECKING:
    from burst_cli.sweep.estimate import Estimate, LaunchJudge

_ID_DIGITS = 10
_MOST_TITLES = 3


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

    @property
    def title(self) -> str:
        """The swept settings in one line: `train.seq_len=4096 attention=ring`."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

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
        return {
            "sweep_id": self.sweep_id,
            "overrides": list(self.overrides),
            "cells": [cell.to_dict() for cell in self.cells],
        }


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
        cell = _settled(words, values, compose, judge)
        cells.setdefault(cell.cell_id, cell)
    sweep_id = _sweep_id(cells, name)
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
    whose = grouped((problem, cell.title) for cell in illegal for problem in cell.problems)
    texts = []
    for problem, titles in whose.items():
        more = len(titles) - _MOST_TITLES
        texts.append(f"{problem}  [{', '.join(titles[:_MOST_TITLES])}{f' and {more} more' if more > 0 else ''}]")
    count = f"{len(illegal)} of {len(plan.cells)} cells cannot run"
    raise ConfigError([*texts, f"{count}; nothing was started. Leave these values out, or add --skip-illegal"])


def _settled(words: tuple[str, ...], values: dict[str, str], compose: Compose, judge: LaunchJudge) -> Cell:
    """A cell with its configuration, or with the reasons why it has none."""
    try:
        config = compose(words)
    except ConfigError as error:
        return Cell(_text_id(words), words, values, problems=error.problems)
    cell = Cell(config_fingerprint(config)[:_ID_DIGITS], words, values, config)
    try:
        return replace(cell, config=judge.settle(config))
    except ConfigError as error:
        return replace(cell, problems=error.problems)


def _judged(cell: Cell, judge: LaunchJudge, known: Mapping[str, str | None]) -> Cell:
    """A cell that can run, with what it takes; predicting memory takes seconds, so it is done once per sweep."""
    if cell.problems or cell.config is None:
        return cell
    shortage = known[cell.cell_id] if cell.cell_id in known else judge.shortage(cell.config)
    return replace(cell, short_of_memory=shortage, estimate=judge.estimate(cell.config))


def _text_id(words: Iterable[str]) -> str:
    """The id of a cell that does not compose."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:_ID_DIGITS]


def _sweep_id(cells: Iterable[str], name: str | None) -> str:
    digest = hashlib.sha256("\0".join(sorted(cells)).encode()).hexdigest()[:8]
    return f"{name}-{digest}" if name else digest
