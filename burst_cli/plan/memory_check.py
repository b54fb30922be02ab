"""Whether a run fits and what it takes, told before anything is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from cluster.plan import LaunchPlan
from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig
from engine.planning.topology import Topology, known_cp_size, sequence_topology
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, find_device, machine_of
from engine.predict.memory import (
    Capacity,
    Fit,
    Hardware,
    MemoryChoice,
    MemoryPrediction,
    Predict,
    PredictStep,
    capacity_of,
    shared_predictor,
)
from engine.runs.figures import binary_bytes, count_of
from engine.runs.files import json_text
from engine.runs.oom import less_memory_text
from engine.runs.record import policy_name

MEMORY_PLAN_FILE = "memory_plan.json"
_LARGEST = 3


@dataclass(frozen=True)
class MemoryPlanner:
    """The engine's knowledge of memory; the configurations that it gets know their number of ranks.

    hardware   of the machines that ranks run on; None: this one
    predictor, timer   instead of the process that predicts memory and time
    """

    hardware: Hardware | None = None
    predictor: Predict | None = None
    timer: PredictStep | None = None

    def resolve_attention_choice(self, config: RunConfig) -> RunConfig:
        """The method in place of attention=auto, as the ranks will settle it: by the name of their device."""
        if config.attention.preset != "auto":
            return config
        from engine.resolve.auto import resolve_auto

        machine = machine_of(config, self.capacity(config).device_name)
        return resolve_auto(config, sequence_topology(config, world_topology(config)), machine).config

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
            world = world_topology(config)
            try:
                return (self.timer or shared_predictor().predict_step)(config, world, machine)
            except RunError:  # that process loads torch, which time needs none of
                from engine.predict.step_time import predict_step

                return predict_step(config, world, machine)
        except ConfigError:
            return None


@dataclass(frozen=True)
class MemoryCheck:
    """What one rank needs at its worst moment, beside what there is; None: not known.

    choice: under memory=auto what was chosen, and from what. advice: what would make it fit. step: how long one takes.
    """

    config: RunConfig
    capacity: Capacity | None
    prediction: MemoryPrediction | None
    choice: MemoryChoice
    advice: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    step: StepTime | None = None

    @property
    def fit(self) -> Fit | None:
        """Of the prediction."""
        if self.prediction is None or self.capacity is None:
            return None
        return self.capacity.fit(*self.prediction.needs)

    @property
    def fits(self) -> bool:
        """As far as is known."""
        return self.fit is None or self.fit.fits

    @property
    def policy(self) -> str:
        """The checkpoint policy in words."""
        return policy_name(self.config.memory)

    @property
    def needs(self) -> str:
        """`79 GiB of 80 GiB on NVIDIA H100`, and what of the host's memory; on a CPU both together."""
        found, capacity = self.prediction, self.capacity
        if found is None:
            return "not predicted"
        if capacity is None:
            return binary_bytes(found.needed_bytes)
        needed = binary_bytes(_on_device(found, capacity))
        text = f"{needed} of {binary_bytes(capacity.device_bytes)} on {capacity.device_name}"
        if capacity.host_is_device or not found.host_peak_bytes:
            return text
        total = capacity.host_bytes_per_node
        has = "an unknown amount" if total is None else binary_bytes(total)
        return f"{text}, {binary_bytes(found.host_peak_bytes * capacity.local_ranks)} of {has} of host memory per node"

    @property
    def problems(self) -> list[str]:
        """One per place that is too small: by how much, the largest components, what to change; empty where it fits."""
        found, capacity, fit = self.prediction, self.capacity, self.fit
        if found is None or capacity is None or fit is None or fit.fits:
            return []
        told = []
        if not fit.device:
            needs = _short(_on_device(found, capacity), capacity.device_bytes)
            source = f"{capacity.device_name} ({capacity.device_source}), by the prediction"
            most = f"most of it in phase {found.phase}. Largest: {_largest(found.components['device'])}"
            told.append(f"does not fit: a rank needs {needs} of {source}; {most}. {self._help('device')}")
        if not fit.host and not capacity.host_is_device and capacity.host_bytes_per_node is not None:
            ranks, most = count_of("rank", capacity.local_ranks), _largest(found.components["host"])
            needs = _short(found.host_peak_bytes * capacity.local_ranks, capacity.host_bytes_per_node)
            source = f"host memory ({capacity.host_source}), by the prediction"
            told.append(
                f"does not fit: {ranks} need {needs} of {source}. Largest, per rank: {most}. {self._help('host')}"
            )
        return told

    def _help(self, place: Literal["device", "host"]) -> str:
        return f"What helps: {'; '.join(self.advice)}." if self.advice else less_memory_text(self.config, place)

    def to_dict(self) -> dict[str, Any]:
        """The part `memory` of a plan, and the content of memory_plan.json; host_capacity_bytes is of a node."""
        empty = dict.fromkeys(("device_peak_bytes", "needed_bytes", "host_peak_bytes", "phase", "components"))
        return {
            **(self.prediction.to_dict() if self.prediction else empty),
            **(self.capacity.to_dict() if self.capacity else {}),
            "fits": self.fit and self.fit.fits,
            "headroom_bytes": self.fit and self.fit.headroom_bytes,
            "policy": self.policy,
            "reason": self.choice.reason,
            "candidates": [candidate.to_dict() for candidate in self.choice.candidates],
            "problems": self.problems,
            "advice": list(self.advice),
            "warnings": list(self.warnings),
            "step_time": self.step and self.step.to_dict(),
        }


def check_memory(config: RunConfig, planner: MemoryPlanner, *, force: bool = False) -> MemoryCheck:
    """Settles memory=auto and compares what a rank needs with what there is.

    Raises ConfigError when the run does not fit, unless `force`; then the check holds the problems. RunError when the
    policy is open and nothing can be predicted.
    """
    is_open, world = config.memory.activation_checkpoint == "auto", world_topology(config)
    capacity, choice, prediction, unknown = None, MemoryChoice(config, (), "as configured"), None, list[str]()
    try:
        capacity = planner.capacity(config)
        if is_open:
            from engine.resolve.memory import resolve_memory

            choice = resolve_memory(config, world, capacity, planner.predict)
    except ConfigError as error:
        if is_open:
            raise
        unknown.append(str(error))
    try:
        prediction = choice.prediction or planner.predict(choice.config, world)
    except RunError as error:
        unknown.append(str(error))
    warnings = tuple(f"not checked whether this run fits: {error}" for error in unknown)
    check = MemoryCheck(choice.config, capacity, prediction, choice, (), warnings)
    check = with_remedies(check, world, planner.predict)
    if check.problems and not force:
        raise ConfigError([f"{problem} To start it all the same, add --force." for problem in check.problems])
    return replace(check, step=planner.predict_time(check.config))


def with_remedies(check: MemoryCheck, world: Topology, predict: Predict, machine: Machine | None = None) -> MemoryCheck:
    """`check` with what would make it fit where it does not; machine: None: as configured, or of that device."""
    if check.capacity is None or check.fits:
        return check
    from engine.resolve.recommend import Adviser

    adviser = Adviser(check.capacity, machine or machine_of(check.config, check.capacity.device_name), predict)
    return replace(check, advice=tuple(adviser.remedies(check.config, world)))


def world_topology(config: RunConfig) -> Topology:
    """Where all ranks of the run lie. Raises ConfigError while their number is unknown."""
    parallel, nodes = config.parallel, config.cluster.topology_groups
    cp_size = known_cp_size(parallel, config.cluster.world_size)
    if cp_size is None:
        raise ConfigError(
            "the number of ranks is unknown: cluster.ranks_per_node is null, which means one per GPU of the machine "
            "that trains; add --ranks N (and --nodes M), such as --ranks 16 --nodes 2"
        )
    world_size = cp_size * parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
    if world_size % nodes:
        raise ConfigError(f"cluster.topology_nodes: {nodes} nodes cannot share {world_size} ranks evenly; see --nodes")
    return Topology(nodes, world_size // nodes)


def group_topology(config: RunConfig) -> Topology:
    """Where the ranks that share one sequence lie. Raises ConfigError while their number is unknown."""
    return sequence_topology(config, world_topology(config))


def with_memory(plan: LaunchPlan, memory: MemoryCheck) -> LaunchPlan:
    """`plan` with memory_plan.json among its files."""
    return replace(plan, files=(*plan.files, (MEMORY_PLAN_FILE, json_text(memory.to_dict()))))


def _on_device(found: MemoryPrediction, capacity: Capacity) -> int:
    """Bytes that a rank takes of what the device has; on a CPU with those of its stores."""
    return found.needed_bytes + (found.host_peak_bytes if capacity.host_is_device else 0)


def _short(needs: int, has: int) -> str:
    return f"{binary_bytes(needs)}, {binary_bytes(needs - has)} more than the {binary_bytes(has)}"


def _largest(components: Mapping[str, int]) -> str:
    ordered = sorted(components.items(), key=lambda item: -item[1])[:_LARGEST]
    return ", ".join(f"{name} {binary_bytes(size)}" for name, size in ordered if size)


@dataclass(frozen=True)
class Estimate:
    """Seconds of wall clock and devices held meanwhile. source: what it rests on, in words. step_s: of one step.

    start_s: the part of `seconds` before the first step; None: not known, and not in `seconds`.
    """

    seconds: float
    devices: int
    source: str
    step_s: float = 0.0
    start_s: float | None = None

    @property
    def device_hours(self) -> float:
        """What clusters are paid by."""
        return self.seconds * self.devices / 3600

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "device_hours": self.device_hours}


def estimate(config: RunConfig, planner: MemoryPlanner, start_s: float | None = None) -> Estimate | None:
    """By the prediction, with the start that earlier runs measured.

    None where the ranks are not known, or a step cannot be predicted.
    """
    ranks, resolved = config.cluster.world_size, with_attention(config, planner)
    step = None if resolved is None else planner.predict_time(resolved)
    if ranks is None or step is None:
        return None
    seconds = (start_s or 0.0) + config.train.steps * step.seconds
    start = "without the start" if start_s is None else "with the start of earlier runs"
    return Estimate(seconds, ranks, f"the prediction for {step.machine}, {start}", step.seconds, start_s)


def with_attention(config: RunConfig, planner: MemoryPlanner) -> RunConfig | None:
    """With attention=auto resolved; None where the ranks are not known, or no method suits them."""
    if config.cluster.world_size is None:
        return None
    try:
        return planner.resolve_attention_choice(config)
    except (ConfigError, RunError):
        return None
