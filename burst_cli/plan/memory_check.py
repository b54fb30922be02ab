"""Whether a run fits and what it takes, told before anything is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from burst_cli.plan.decisions import memory_words
from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, find_device, machine_of
from engine.predict.memory import (
    Capacity,
    Fit,
    Hardware,
    MemoryPrediction,
    Predict,
    capacity_of,
    shared_predictor,
)
from engine.predict.step_time import predict_step
from engine.resolve.decisions import Decision
from engine.resolve.degrees import world_topology
from engine.resolve.recommend import Adviser
from engine.resolve.run import ResolvedRun, resolve_run
from engine.runs.figures import binary_bytes, count_of
from engine.runs.oom import less_memory_text
from engine.runs.record import policy_name

MEMORY_PLAN_FILE = "memory_plan.json"
_LARGEST = 3


@dataclass(frozen=True)
class MemoryPlanner:
    """The engine's knowledge of memory; the configurations that it gets know their number of ranks.

    hardware   of the machines that ranks run on; None: this one
    predictor  instead of the process that predicts memory
    """

    hardware: Hardware | None = None
    predictor: Predict | None = None

    def resolve(self, config: RunConfig, *, search: bool = True) -> ResolvedRun:
        """Everything that `config` leaves open, decided for its ranks, once.

        search: else memory=auto counts as a policy that costs nothing. Raises ConfigError, and RunError where a policy
        is searched for and memory cannot be predicted.
        """
        if not search:
            config = without_search(config)
        try:
            capacity = self.capacity(config)
        except ConfigError:
            if config.memory.activation_checkpoint == "auto":
                raise
            capacity = None
        machine = self._machine(config, None if capacity is None else capacity.device_name)
        return resolve_run(config, world_topology(config), machine, capacity, self.predict)

    def _machine(self, config: RunConfig, device: str | None) -> Machine:
        """As one of its ranks sees it."""
        cluster = config.cluster
        cores = len(os.sched_getaffinity(0)) if self.hardware is None else None
        return machine_of(config, device).shared_by(cluster.ranks_per_node or 1, cluster.threads_per_rank, cores)

    def capacity(self, config: RunConfig) -> Capacity:
        """The GPUs or the RAM of a machine, within memory.device_bytes and memory.host_bytes. Raises ConfigError."""
        # All its ranks share a machine, also those that cluster.topology_nodes treats as lying on others.
        return capacity_of(config, config.cluster.ranks_per_node or 1, hardware=self.hardware)

    def predict(self, config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        """Raises RunError when it cannot be made."""
        return (self.predictor or shared_predictor().predict)(config, method, world)

    def predict_time(self, run: ResolvedRun) -> StepTime | None:
        """A step on the configured or detected machine; None where it is not known, or the step cannot be planned."""
        is_named = run.config.cluster.machine.name != "auto"
        if run.capacity is None or not (is_named or find_device(run.capacity.device_name)):
            return None
        try:
            return predict_step(run.config, run.method, run.world, run.machine)
        except ConfigError:
            return None


def without_search(config: RunConfig) -> RunConfig:
    """With a memory policy that costs nothing in the place of one that would have to be searched for."""
    if config.memory.activation_checkpoint != "auto":
        return config
    return replace(config, memory=replace(config.memory, activation_checkpoint="none"))


@dataclass(frozen=True)
class MemoryCheck:
    """What one rank of a resolved run needs at its worst moment, beside what there is; None: not known.

    advice: what would make it fit. step: how long one takes.
    """

    run: ResolvedRun
    prediction: MemoryPrediction | None
    advice: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    step: StepTime | None = None

    @property
    def config(self) -> RunConfig:
        """What runs."""
        return self.run.config

    @property
    def capacity(self) -> Capacity | None:
        """What there is."""
        return self.run.capacity

    @property
    def decision(self) -> Decision:
        """How it has its policy, and what that was chosen from."""
        return self.run.decision("memory.activation_checkpoint")

    @property
    def reason(self) -> str:
        """That in words."""
        return memory_words(self.decision, self.capacity)

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
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.decision.candidates],
            "problems": self.problems,
            "advice": list(self.advice),
            "warnings": list(self.warnings),
            "step_time": self.step and self.step.to_dict(),
        }


def check_memory(run: ResolvedRun, planner: MemoryPlanner, *, force: bool = False) -> MemoryCheck:
    """Compares what a rank of `run` needs with what there is.

    Raises ConfigError when it does not fit, unless `force`; then the check holds the problems.
    """
    prediction, unknown = run.prediction, list[str]()
    if run.capacity is None:
        try:
            planner.capacity(run.config)
        except ConfigError as error:
            unknown.append(str(error))
    try:
        prediction = prediction or planner.predict(run.config, run.method, run.world)
    except RunError as error:
        unknown.append(str(error))
    warnings = tuple(f"not checked whether this run fits: {error}" for error in unknown)
    check = with_remedies(MemoryCheck(run, prediction, (), warnings), planner.predict)
    if check.problems and not force:
        raise ConfigError([f"{problem} To start it all the same, add --force." for problem in check.problems])
    return replace(check, step=planner.predict_time(run))


def with_remedies(check: MemoryCheck, predict: Predict) -> MemoryCheck:
    """`check` with what would make it fit where it does not."""
    if check.capacity is None or check.fits:
        return check
    adviser = Adviser(check.capacity, check.run.machine, predict)
    return replace(check, advice=tuple(adviser.remedies(check.config, check.run.world)))


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


def estimate(run: ResolvedRun, step: StepTime | None, start_s: float | None = None) -> Estimate | None:
    """By the prediction of a step, with the start that earlier runs measured; None where it could not be predicted."""
    if step is None:
        return None
    train = run.config.train
    seconds = (start_s or 0.0) + train.steps * step.seconds
    start = "without the start" if start_s is None else "with the start of earlier runs"
    source = f"the prediction for {step.machine}, {start}"
    return Estimate(seconds, run.world.size, source, step.seconds, start_s)
