"""Whether a run fits, decided before anything is created: closed form first, the exact prediction when it is near.

`check_memory` is pure but for the planner it is given; `burst launch` gives `burst_cli.engine_memory.EnginePlanner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from burst_cli.figures import binary_bytes
from cluster.plan import LaunchPlan
from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig
from engine.memory.auto import MemoryChoice
from engine.memory.capacity import Capacity
from engine.memory.fit import Prediction, fit_of
from engine.runs.records import json_text

Place = Literal["device", "host"]

# The closed form is rough, but not by a factor of two: a run that fits twice over fits, and one of which not even half
# fits does not.
_TWICE, _HALF = 1.0, -0.5
MEMORY_PLAN_FILE = "memory_plan.json"
_LARGEST = 3


class MemoryPlanner(Protocol):
    """What knows about memory; the configurations that it gets know their number of ranks, and their method."""

    def capacity(self, config: RunConfig) -> Capacity:
        """What the machine, or the configuration, has. Raises ConfigError when that is not known."""

    def settle(self, config: RunConfig, capacity: Capacity, *, exactly: bool) -> MemoryChoice:
        """The policy for memory.activation_checkpoint=auto; exactly: the one chosen was predicted, in seconds."""

    def estimate(self, config: RunConfig) -> Prediction:
        """The closed form, in milliseconds."""

    def predict(self, config: RunConfig) -> Prediction:
        """The exact prediction, in seconds. Raises RunError when it cannot be made."""

    def advice(self, config: RunConfig, capacity: Capacity, place: Place) -> str:
        """Sentences that say what to change when memory is short at `place`."""


@dataclass(frozen=True)
class MemoryCheck:
    """A run's need beside what there is (None: not known). `problems` is empty when it fits.

    need: of one rank. source: how it was found, "the closed form" or "the prediction". choice: under memory=auto.
    """

    config: RunConfig
    need: Prediction
    source: str
    capacity: Capacity | None
    choice: MemoryChoice | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: what a rank needs, of what, by which reckoning."""
        text = binary_bytes(self.need.needed_bytes)
        if self.capacity is not None:
            text += f" of {binary_bytes(self.capacity.device_bytes)} per rank on {self.capacity.device_name}"
        host = f", {binary_bytes(self.need.host_peak_bytes)} of host memory" if self.need.host_peak_bytes else ""
        return f"{text}{host}, by {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """The content of memory_plan.json."""
        need, capacity, choice = self.need, self.capacity, self.choice
        return {
            "source": self.source,
            "device_peak_bytes": need.device_peak_bytes,
            "needed_bytes": need.needed_bytes,
            "host_peak_bytes": need.host_peak_bytes,
            "phase": need.phase,
            "components": {place: dict(components) for place, components in need.components.items()},
            "capacity": None if capacity is None else capacity.to_dict(),
            "fits": None if capacity is None else not self.problems,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "policy": self.config.memory.activation_checkpoint,
            "policy_reason": None if choice is None else choice.reason,
            "candidates": [] if choice is None else [candidate.to_dict() for candidate in choice.candidates],
        }


def check_memory(config: RunConfig, planner: MemoryPlanner, *, force: bool = False) -> MemoryCheck:
    """Settles memory=auto and compares what a rank needs with what there is.

    Raises ConfigError when the run does not fit, unless `force`; then the check holds the problems.
    """
    is_open = config.memory.activation_checkpoint == "auto"
    check = _settled(config, planner) if is_open else _configured(config, planner)
    if check.capacity is not None:
        check = replace(check, problems=tuple(_problems(check, check.capacity, planner)))
    if check.problems and not force:
        raise ConfigError([f"{problem} To start it all the same, add --force." for problem in check.problems])
    return check


def with_memory(plan: LaunchPlan, memory: MemoryCheck) -> LaunchPlan:
    """`plan` with memory_plan.json among its files."""
    return replace(plan, files=(*plan.files, (MEMORY_PLAN_FILE, json_text(memory.to_dict()))))


def _configured(config: RunConfig, planner: MemoryPlanner) -> MemoryCheck:
    """The check of a configuration that names its policy."""
    closed = MemoryCheck(config, planner.estimate(config), "the closed form", None)
    try:
        capacity = planner.capacity(config)
    except ConfigError as error:
        return replace(closed, warnings=(f"not checked whether this run fits: {error}",))
    closed = replace(closed, capacity=capacity)
    if _is_sure(closed.need, capacity):
        return closed
    try:
        return replace(closed, need=planner.predict(config), source="the prediction")
    except RunError as error:
        return replace(closed, warnings=(_fallback(error),))


def _settled(config: RunConfig, planner: MemoryPlanner) -> MemoryCheck:
    """The check of the policy that is chosen; the choice is verified by the prediction unless it is sure."""
    capacity = planner.capacity(config)
    choice = planner.settle(config, capacity, exactly=False)
    closed = MemoryCheck(choice.config, planner.estimate(choice.config), "the closed form", capacity, choice)
    if _is_sure(closed.need, capacity):
        return closed
    try:
        choice = planner.settle(config, capacity, exactly=True)
        chosen = next(one for one in choice.candidates if one.memory == choice.config.memory)
        need = chosen.prediction or planner.predict(choice.config)
    except RunError as error:
        return replace(closed, warnings=(_fallback(error),))
    return MemoryCheck(choice.config, need, "the prediction", capacity, choice)


def _is_sure(closed_form: Prediction, capacity: Capacity) -> bool:
    """Whether the closed form is enough to decide."""
    return fit_of(closed_form, capacity, _TWICE).fits or not fit_of(closed_form, capacity, _HALF).fits


def _fallback(error: RunError) -> str:
    return f"{error} Whether this run fits is decided by the closed form."


def _problems(check: MemoryCheck, capacity: Capacity, planner: MemoryPlanner) -> list[str]:
    """One per place that is too small: by how much, the largest components, what to change."""
    need, on_cpu, problems = check.need, capacity.host_is_device, []
    fit = fit_of(need, capacity)
    if not fit.device:
        needs = need.needed_bytes + (need.host_peak_bytes if on_cpu else 0)
        problems.append(
            f"does not fit: a rank needs {_of(needs, capacity.device_bytes)} of {capacity.device_name} "
            f"({capacity.device_source}), by {check.source}; most of it in phase {need.phase}. "
            f"Largest: {_largest(need.components['device'])}. {planner.advice(check.config, capacity, 'device')}"
        )
    if not fit.host and not on_cpu and capacity.host_bytes_per_node is not None:
        ranks = capacity.local_ranks
        needs = need.host_peak_bytes * ranks
        problems.append(
            f"does not fit: {ranks} rank{'' if ranks == 1 else 's'} need "
            f"{_of(needs, capacity.host_bytes_per_node)} of host memory "
            f"({capacity.host_source}), by {check.source}. "
            f"Largest, per rank: {_largest(need.components['host'])}. "
            f"{planner.advice(check.config, capacity, 'host')}"
        )
    return problems


def _of(needs: int, has: int) -> str:
    return f"{binary_bytes(needs)}, {binary_bytes(needs - has)} more than the {binary_bytes(has)}"


def _largest(components: Mapping[str, int]) -> str:
    ordered = sorted(components.items(), key=lambda item: -item[1])[:_LARGEST]
    return ", ".join(f"{name} {binary_bytes(size)}" for name, size in ordered if size)
