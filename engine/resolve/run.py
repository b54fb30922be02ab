"""`ResolvedRun`: a configuration without open settings, and all values derived from it and its machines.

    words -> RunConfig -> survey -> resolve_run, once -> ResolvedRun -> predictions, launch plan -> RUN/resolved.json

The launcher resolves; ranks read the file, compare its hash, and select nothing but the kernel that they can run. Ranks
started by another launcher, with a config.yaml alone, resolve it together at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.schema import Problem, hash_json, read_dataclass, to_plain
from engine.config.settings import RunConfig, config_from_dict
from engine.planning.methods.layers import LayerPattern, layer_pattern
from engine.planning.methods.presets import AttentionMethod, tile_tokens_of
from engine.planning.topology import Degrees, Topology
from engine.predict.machine import Machine
from engine.predict.memory import Capacity, MemoryPrediction, Predict
from engine.resolve.attention import select_moving_operand, select_preset
from engine.resolve.decisions import Decision, decision_from_dict
from engine.resolve.degrees import resolve_topology
from engine.resolve.memory import resolve_memory
from engine.runs.files import json_text, read_json_object
from engine.runs.folder import RESOLVED_FILE
from engine.runs.record import config_fingerprint

_FORMAT = 1


@dataclass(frozen=True)
class ResolvedRun:
    """The resolved configuration of a run, equal on every rank.

    Attributes:
        config: The configuration, without any `auto` but that of the kernel, which each rank selects by a trial.
        requested: Fingerprint of the configuration that it was resolved from.
        world: Topology of all ranks.
        group: Topology of the ranks that share one sequence.
        degrees: Size of every parallel axis.
        machine: Device and links for which times were predicted.
        method: The attention method, without open settings.
        layers: Mask and recomputation of the layers; the pattern repeats.
        tile_tokens: Rows per tile of projections and MLP; None: all rows at a time.
        capacity: Memory of device and host; None: unknown.
        memory_fits: Whether memory fits by prediction; None: the policy was configured and not predicted yet.
        decisions: The value of every setting that may be open, and the rule that selected it.
    """

    config: RunConfig
    requested: str
    world: Topology
    group: Topology
    degrees: Degrees
    machine: Machine
    method: AttentionMethod
    layers: tuple[LayerPattern, ...]
    tile_tokens: int | None
    capacity: Capacity | None
    memory_fits: bool | None
    decisions: tuple[Decision, ...]

    def decision(self, setting: str) -> Decision:
        """Return the decision about a setting, by its dotted key."""
        return next(decision for decision in self.decisions if decision.setting == setting)

    @property
    def prediction(self) -> MemoryPrediction | None:
        """The predicted memory of the policy that a search selected; None without a search, and on ranks."""
        candidates = self.decision("memory.activation_checkpoint").candidates
        return candidates[0].prediction if candidates else None

    @property
    def hash(self) -> str:
        """SHA-256 as 64 hex digits: equal exactly when all values that ranks read are equal."""
        return hash_json(_whole_numbers(_to_dict(self)))


def resolve_run(
    config: RunConfig,
    world: Topology,
    machine: Machine,
    capacity: Capacity | None = None,
    predict: Predict | None = None,
) -> ResolvedRun:
    """Resolve every open setting of `config` for the ranks of `world`: first the attention method, then memory.

    Args:
        config: A configuration that is legal by `engine.resolve.legality`, with the number of ranks of `world`.
        world: Topology of all ranks.
        machine: Device and links for which times are predicted.
        capacity: Memory of device and host; required under memory=auto.
        predict: Predicts memory; required under memory=auto, which searches over policies.

    Raises:
        ConfigError: Lists every violated rule.
        RunError: `predict` failed.
    """
    degrees, _ = resolve_topology(config.parallel, world.size, world.nodes)
    group = degrees.cp_topology(world)
    attention, preset = select_preset(config, group, machine)
    resolved = replace(config, attention=attention)
    memory = resolve_memory(resolved, world, machine, capacity, predict)
    resolved = replace(resolved, memory=memory.memory)
    method, moving_operand = select_moving_operand(resolved, group, machine)
    return ResolvedRun(
        config=resolved,
        requested=config_fingerprint(config),
        world=world,
        group=group,
        degrees=degrees,
        machine=machine,
        method=method,
        layers=layer_pattern(resolved, method),
        tile_tokens=tile_tokens_of(resolved, method),
        capacity=capacity,
        memory_fits=memory.fits if memory.candidates else None,
        decisions=(preset, moving_operand, memory.decision),
    )


# --- the file ---------------------------------------------------------------------------------------------------------


def resolved_text(run: ResolvedRun) -> str:
    """Return the text of resolved.json."""
    return json_text({"format": _FORMAT, "hash": run.hash, "run": _to_dict(run)})


def read_resolved(path: Path, requested: RunConfig) -> ResolvedRun | None:
    """Return the `ResolvedRun` that a launch wrote into the run folder `path`; None: no launch wrote one.

    Args:
        path: The run folder.
        requested: The configuration in config.yaml, which it must have been resolved from.

    Raises:
        ConfigError: The file was changed after it was written, or belongs to another configuration.
    """
    file = path / RESOLVED_FILE
    if not file.is_file():
        return None
    try:
        run = _read(file)
    except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"damaged, or changed after it was written: {error}"
        raise ConfigError(
            f"{file}: {text}. Restore the file, or start a new `burst launch` with "
            "train.checkpoint.resume_from set to this run"
        ) from error
    if config_fingerprint(requested) != run.requested:
        raise ConfigError(
            f"{file} was not made from {path / 'config.yaml'}: one of them was changed after the launch, or comes from "
            "another run. Restore the file, or start a new `burst launch` with "
            "train.checkpoint.resume_from set to this run"
        )
    return run


def _read(file: Path) -> ResolvedRun:
    document = read_json_object(file) or {}
    if document.get("format") != _FORMAT:
        raise ValueError(f"format: got {document.get('format')!r}, expected {_FORMAT}")
    run = resolved_from_dict(document["run"])
    if run.hash != document.get("hash"):
        raise ValueError("its hash is not that of its content")
    return run


def _to_dict(run: ResolvedRun) -> dict[str, Any]:
    plain = {item.name: to_plain(getattr(run, item.name)) for item in fields(run) if item.name != "decisions"}
    return {**plain, "decisions": [decision.to_dict() for decision in run.decisions]}


def _whole_numbers(value: Any) -> Any:
    """Return the values with 5 for 5.0: a figure that is read back as a float must not change the hash."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def resolved_from_dict(values: Mapping[str, Any]) -> ResolvedRun:
    """Return the run that `_to_dict` wrote. Raises ValueError, LookupError or TypeError for other values."""
    problems: list[Problem] = []

    def read(cls: type[Any], value: Any) -> Any:
        found, mistakes = read_dataclass(cls, value)
        problems.extend(mistakes)
        return found

    run = ResolvedRun(
        config=config_from_dict(values["config"]),
        requested=str(values["requested"]),
        world=Topology(**values["world"]),
        group=Topology(**values["group"]),
        degrees=Degrees(**values["degrees"]),
        machine=read(Machine, values["machine"]),
        method=read(AttentionMethod, values["method"]),
        layers=tuple(LayerPattern(**layer) for layer in values["layers"]),
        tile_tokens=values["tile_tokens"],
        capacity=None if values["capacity"] is None else Capacity(**values["capacity"]),
        memory_fits=values["memory_fits"],
        decisions=tuple(map(decision_from_dict, values["decisions"])),
    )
    if problems:
        raise ValueError("; ".join(problem.text for problem in problems))
    return run
