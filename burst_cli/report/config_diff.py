"""In which settings two sets of runs differ, and which of those change what is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_cli.report.values import one_line
from engine.config import config_to_dict, load_config
from engine.errors import ConfigError

# Neither the arithmetic nor its speed follows from these.
_HARMLESS = (
    "exp",
    "train.log_interval_steps",
    "train.tensorboard",
    "train.eval_interval_steps",
    "train.eval_samples",
    "train.warmup_metric_steps",
    "data.prepared_dir",
    "cluster.",
)
_TELLING = ("cluster.num_nodes", "cluster.ranks_per_node", "cluster.backend", "cluster.threads_per_rank")

# Their values may be secrets, and reports are passed on.
_SECRET = ("cluster.environment",)


@dataclass(frozen=True)
class ConfigDifference:
    """One setting that is not the same on both sides; a, b: its values there. matters: figures may follow from it."""

    key: str
    a: str
    b: str
    matters: bool


def config_differences(a: Sequence[Path], b: Sequence[Path]) -> tuple[tuple[ConfigDifference, ...], list[str]]:
    """(settings whose values differ between or within the sides, what could not be read); takes run folders."""
    problems: list[str] = []
    sides = [_values(folders, problems) for folders in (a, b)]
    keys = dict.fromkeys([*sides[0], *sides[1]])
    found = tuple(
        ConfigDifference(key, _words(sides[0].get(key)), _words(sides[1].get(key)), _matters(key))
        for key in keys
        if sides[0].get(key) != sides[1].get(key) or any(len(side.get(key, ())) > 1 for side in sides)
    )
    return (found if all(sides) else ()), problems


def _values(folders: Sequence[Path], problems: list[str]) -> dict[str, dict[str, None]]:
    """Every dotted key with the values, as JSON, that it has in these runs."""
    found: dict[str, dict[str, None]] = {}
    for folder in folders:
        try:
            config = config_to_dict(load_config(folder / "config.yaml"))
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        for key, value in _flat(config, ""):
            shown = _names_only(value) if key in _SECRET else value
            found.setdefault(key, {})[json.dumps(shown, sort_keys=True, default=str)] = None
    return found


def _names_only(settings: Sequence[str]) -> list[str]:
    """The names of NAME=VALUE."""
    return [setting.partition("=")[0] for setting in settings]


def _flat(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def _words(values: Mapping[str, None] | None) -> str:
    return one_line(" or ".join(values)) if values else "absent"


def _matters(key: str) -> bool:
    return key in _TELLING or not any(key == name or (name[-1] == "." and key.startswith(name)) for name in _HARMLESS)
