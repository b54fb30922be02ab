"""Whether a run fits, decided before anything is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from burst_cli.figures import binary_bytes
from cluster.plan import LaunchPlan
from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig
from engine.planning.memory.auto import MemoryChoice, settle_memory
from engine.planning.memory.capacity import Capacity, Hardware, capacity_of
from engine.planning.memory.fit import predicted_fit, sequence_topology
from engine.planning.memory.predictor import MemoryPrediction, Predict, shared_predictor
from engine.planning.methods.auto import resolve_auto
from engine.planning.methods.resolve import machine_of
from engine.planning.methods.topology import Topology
from engine.planning.time.devices import find_device
from engine.planning.time.recommend import Adviser
from engine.planning.time.step_time import StepTime, predict_step
from engine.runs.oom import less_memory_text
from engine.runs.records import json_text

Place = Literal["device", "host"]

MEMORY_PLAN_FILE = "memory_plan.json"
_LARGEST = 3


@dataclass(frozen=True)
class MemoryPlanner:
    """The engine's knowledge of memory; the configurations that it gets know their number of ranks.

    hardware   of the machines that ranks run on; None: this one
    """

    hardware: Hardware | None = None
    predictor: Predict | None = None

    def settle_attention(self, config: RunConfig) -> RunConfig:
        """The method in place of attention=auto, as the ranks will settle it: by the name of their device."""
        if config.attention.preset != "auto":
            return config
        machine = machine_of(config, self.capacity(config).device_name)
        return resolve_auto(config, sequence_topology(config, world_of(config)), machine).config

    def capacity(self, config: RunConfig) -> Capacity:
        """The GPUs or the RAM of a machine, within memory.device_bytes and memory.host_bytes. Raises ConfigError."""
        # All its ranks share a machine, also those that cluster.topology_nodes treats as lying on others.
        return capacity_of(config, config.cluster.ranks_per_node or 1, hardware=self.hardware)

    def predict(self, config: RunConfig, world: Topology) -> MemoryPrediction:
        """Raises RunError when it cannot be made."""
        return (self.predictor or shared_predictor().predict)(config, world)

    def predict_time(self, config: RunConfig) -> StepTime | None:
        """A step on the configured or detected machine; None where it is not known, or the step cannot be planned."""
        try:
            if config.memory.activation_checkpoint == "auto":  # taken for one that costs nothing
                config = replace(config, memory=replace(config.memory, activation_checkpoint="none"))
            device, cluster = self.capacity(config).device_name, config.cluster
            if cluster.machine.name == "auto" and find_device(device) is None:
                return None
            cores = len(os.sched_getaffinity(0)) if self.hardware is None else None
            machine = machine_of(config, device).shared_by(cluster.ranks_per_node or 1, cluster.threads_per_rank, cores)
            return predict_step(config, world_of(config), machine)
        except ConfigError:
            return None

    def advice(self, config: RunConfig, capacity: Capacity, place: Place) -> str:
        """Changes with which the run is known to fit, or else the settings that need less."""
        machine = machine_of(config, capacity.device_name)
        found = Adviser(capacity, machine, self.predict).remedies(config, world_of(config))
        return f"What helps: {'; '.join(found)}." if found else less_memory_text(config, place)


@dataclass(frozen=True)
class MemoryCheck:
    """A run's need beside what there is; None: not known. `problems` is empty when it fits.

    need: of one rank. choice: under memory=auto. step: how long one takes.
    """

    config: RunConfig
    need: MemoryPrediction | None
    capacity: Capacity | None
    choice: MemoryChoice | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    step: StepTime | None = None

    @property
    def summary(self) -> str:
        """One line: what a rank needs, of what."""
        if self.need is None:
            return "not predicted"
        text = binary_bytes(self.need.needed_bytes)
        if self.capacity is not None:
            text += f" of {binary_bytes(self.capacity.device_bytes)} per rank on {self.capacity.device_name}"
        host = f", {binary_bytes(self.need.host_peak_bytes)} of host memory" if self.need.host_peak_bytes else ""
        return f"{text}{host}, by the prediction"

    def to_dict(self) -> dict[str, Any]:
        """The content of memory_plan.json."""
        need, capacity, choice = self.need, self.capacity, self.choice
        return {
            "source": "the prediction",
            "device_peak_bytes": need and need.device_peak_bytes,
            "needed_bytes": need and need.needed_bytes,
            "host_peak_bytes": need and need.host_peak_bytes,
            "phase": need and need.phase,
            "components": need and {place: dict(components) for place, components in need.components.items()},
            "capacity": None if capacity is None else capacity.to_dict(),
            "fits": None if capacity is None or need is None else not self.problems,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "step_time": self.step and self.step.to_dict(),
            "policy": self.config.memory.activation_checkpoint,
            "policy_reason": None if choice is None else choice.reason,
            "candidates": [] if choice is None else [candidate.to_dict() for candidate in choice.candidates],
        }


def check_memory(config: RunConfig, planner: MemoryPlanner, *, force: bool = False) -> MemoryCheck:
    """Settles memory=auto and compares what a rank needs with what there is.

    Raises ConfigError when the run does not fit, unless `force`; then the check holds the problems. RunError when the
    policy is open and nothing can be predicted.
    """
    is_open = config.memory.activation_checkpoint == "auto"
    check = _settled(config, planner) if is_open else _configured(config, planner)
    if check.capacity is not None and check.need is not None:
        check = replace(check, problems=tuple(_problems(check.config, check.need, check.capacity, planner)))
    if check.problems and not force:
        raise ConfigError([f"{problem} To start it all the same, add --force." for problem in check.problems])
    return replace(check, step=planner.predict_time(check.config))


def world_of(config: RunConfig) -> Topology:
    """Where all ranks of a launch lie."""
    ranks, nodes = config.cluster.world_size or 1, config.cluster.topology_groups
    return Topology(nodes, ranks // nodes)


def with_memory(plan: LaunchPlan, memory: MemoryCheck) -> LaunchPlan:
    """`plan` with memory_plan.json among its files."""
    return replace(plan, files=(*plan.files, (MEMORY_PLAN_FILE, json_text(memory.to_dict()))))


def _configured(config: RunConfig, planner: MemoryPlanner) -> MemoryCheck:
    """The check of a configuration that names its policy."""
    need, capacity, warnings = None, None, list[str]()
    try:
        capacity = planner.capacity(config)
    except ConfigError as error:
        warnings.append(f"not checked whether this run fits: {error}")
    try:
        need = planner.predict(config, world_of(config))
    except RunError as error:
        warnings.append(f"not checked whether this run fits: {error}")
    return MemoryCheck(config, need, capacity, warnings=tuple(warnings))


def _settled(config: RunConfig, planner: MemoryPlanner) -> MemoryCheck:
    """The check of the policy that is chosen."""
    capacity = planner.capacity(config)
    choice = settle_memory(config, world_of(config), capacity, planner.predict)
    return MemoryCheck(choice.config, choice.prediction, capacity, choice)


def _problems(config: RunConfig, need: MemoryPrediction, capacity: Capacity, planner: MemoryPlanner) -> list[str]:
    """One per place that is too small: by how much, the largest components, what to change."""
    on_cpu, problems = capacity.host_is_device, []
    fit = predicted_fit(need, capacity)
    if not fit.device:
        needs = need.needed_bytes + (need.host_peak_bytes if on_cpu else 0)
        problems.append(
            f"does not fit: a rank needs {_of(needs, capacity.device_bytes)} of {capacity.device_name} "
            f"({capacity.device_source}), by the prediction; most of it in phase {need.phase}. "
            f"Largest: {_largest(need.components['device'])}. {planner.advice(config, capacity, 'device')}"
        )
    if not fit.host and not on_cpu and capacity.host_bytes_per_node is not None:
        ranks = capacity.local_ranks
        needs = need.host_peak_bytes * ranks
        problems.append(
            f"does not fit: {ranks} rank{'' if ranks == 1 else 's'} need "
            f"{_of(needs, capacity.host_bytes_per_node)} of host memory "
            f"({capacity.host_source}), by the prediction. "
            f"Largest, per rank: {_largest(need.components['host'])}. "
            f"{planner.advice(config, capacity, 'host')}"
        )
    return problems


def _of(needs: int, has: int) -> str:
    return f"{binary_bytes(needs)}, {binary_bytes(needs - has)} more than the {binary_bytes(has)}"


def _largest(components: Mapping[str, int]) -> str:
    ordered = sorted(components.items(), key=lambda item: -item[1])[:_LARGEST]
    return ", ".join(f"{name} {binary_bytes(size)}" for name, size in ordered if size)
