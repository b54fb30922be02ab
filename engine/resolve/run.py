"""`ResolvedRun`: a configuration with nothing left open, and all that follows from it and from its machines.

    words -> RunConfig -> survey -> resolve_run, once -> ResolvedRun -> predictions, launch plan -> RUN/resolved.json

Whoever launches resolves; ranks read the file, compare its hash, and decide nothing but which kernel they can run.
Ranks that something else starts, with a config.yaml alone, resolve it together when they start.
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
    """What every rank does.

    Attributes:
        config: with no `auto` left but that of the kernel, which a trial on each rank decides.
        requested: fingerprint of the configuration that it was resolved from.
        world: where all ranks are; group: those that share one sequence.
        degrees: size of every axis.
        machine: on which time was predicted.
        method: attention, resolved to its last axis.
        layers: mask and recomputation of the layers, repeating.
        tile_tokens: rows at a time that layers work on; None: all.
        capacity: the memory that there is; None: unknown.
        memory_fits: None: a policy was configured, and nothing has been predicted for it yet.
        decisions: what was open, or might have been, and by which rule it has its value.
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
        """That about a setting, by its dotted key."""
        return next(decision for decision in self.decisions if decision.setting == setting)

    @property
    def prediction(self) -> MemoryPrediction | None:
        """The memory of the policy that a search has chosen; None where none was made, and on ranks."""
        candidates = self.decision("memory.activation_checkpoint").candidates
        return candidates[0].prediction if candidates else None

    @property
    def hash(self) -> str:
        """64 hex digits: equal exactly when all that ranks read is equal."""
        return hash_json(_whole_numbers(_to_dict(self)))


def resolve_run(
    config: RunConfig,
    world: Topology,
    machine: Machine,
    capacity: Capacity | None = None,
    predict: Predict | None = None,
) -> ResolvedRun:
    """Everything that `config` leaves open, decided for the ranks of `world`: the method, then the memory policy.

    Args:
        config: legal by `engine.resolve.legality`; its number of ranks is that of `world`.
        world: where all ranks are.
        machine: on which time is predicted.
        capacity: the memory that there is; needed under memory=auto.
        predict: predicts memory; needed under memory=auto, which tries policies: the only loop.

    Raises:
        ConfigError: with every rule that is violated.
        RunError: `predict` fails.
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
    """The content of resolved.json."""
    return json_text({"format": _FORMAT, "hash": run.hash, "run": _to_dict(run)})


def read_resolved(path: Path, requested: RunConfig) -> ResolvedRun | None:
    """What the launch of the run in folder `path` resolved; None: no launch has.

    Args:
        path: the run folder.
        requested: the configuration in config.yaml, which it must have been made from.

    Raises:
        ConfigError: the file is not what was written, or was made from another configuration.
    """
    file = path / RESOLVED_FILE
    if not file.is_file():
        return None
    try:
        run = _read(file)
    except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"damaged, or changed after it was written: {error}"
        raise ConfigError(
            f"{file}: {text}. Put back what the launch wrote, or start a new `burst launch` with "
            "train.checkpoint.resume_from set to this run"
        ) from error
    if config_fingerprint(requested) != run.requested:
        raise ConfigError(
            f"{file} was not made from {path / 'config.yaml'}: one of them was changed after the launch, or comes from "
            "another run. Put back what the launch wrote, or start a new `burst launch` with "
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
    """The same values with 5 for 5.0: a figure that is read back as a float must not change the hash."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def resolved_from_dict(values: Mapping[str, Any]) -> ResolvedRun:
    """The run that `_to_dict` wrote. Raises ValueError, LookupError or TypeError where it is none."""
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
