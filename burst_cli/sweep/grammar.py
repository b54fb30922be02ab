"""A sweep as it is typed becomes axes and cells. Pure; `burst_cli.compose` parses, because only it may know Hydra."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.errors import ConfigError

MOST_CELLS = 2_000


@dataclass(frozen=True)
class Axis:
    """One override with its values: `train.seq_len=512,1024` has two, `exp=tiny` one.

    overrides: one per value, as a launch takes it. values: the same without key and sign, as people read them.
    """

    key: str
    overrides: tuple[str, ...]
    values: tuple[str, ...]
    is_sweep: bool


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
    cells = math.prod(len(axis.values) for axis in axes)
    if cells > MOST_CELLS:
        problems.append(f"{cells} cells: a sweep has at most {MOST_CELLS}; leave out values or split it")
    if problems:
        raise ConfigError(problems)


def cells_of(axes: Sequence[Axis]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """(overrides, {swept setting: value}) of every cell, the last axis changing fastest, as nested loops would."""
    cells = []
    for places in itertools.product(*(range(len(axis.values)) for axis in axes)):
        chosen = list(zip(axes, places, strict=True))
        values = {axis.key: axis.values[place] for axis, place in chosen if axis.is_sweep}
        cells.append((tuple(axis.overrides[place] for axis, place in chosen), values))
    return cells
