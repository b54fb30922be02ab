"""Whether a configuration can run, fits, and what it takes: what a launch would find out, for every cell beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from burst_cli.plan.memory_check import MemoryPlanner, check_memory, group_topology
from cluster.facts import MachineFacts
from cluster.launch.runner import runner_for
from cluster.plan import with_ranks
from engine.config.errors import ConfigError, RunError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.sequence.layers import check_attention

ASSUMED_START_S = 60.0


@dataclass(frozen=True)
class Estimate:
    """Seconds of wall clock and devices held meanwhile. source: what it rests on, in words. step_s: of one step."""

    seconds: float
    devices: int
    source: str
    step_s: float = 0.0

    @property
    def device_hours(self) -> float:
        """What clusters are paid by."""
        return self.seconds * self.devices / 3600

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "device_hours": self.device_hours}


def estimate(config: RunConfig, planner: MemoryPlanner) -> Estimate | None:
    """By the prediction; None where the ranks are not known, or a step cannot be predicted."""
    ranks, settled = config.cluster.world_size, _with_attention(config, planner)
    step = None if settled is None else planner.predict_time(settled)
    if ranks is None or step is None:
        return None
    seconds = ASSUMED_START_S + config.train.steps * step.seconds
    return Estimate(seconds, ranks, f"the prediction for {step.machine}", step.seconds)


def _with_attention(config: RunConfig, planner: MemoryPlanner) -> RunConfig | None:
    """With attention=auto settled; None where the ranks are not known, or no method suits them."""
    if config.cluster.world_size is None:
        return None
    try:
        return planner.settle_attention(config)
    except (ConfigError, RunError):
        return None


def total(estimates: Sequence[Estimate | None], parallel: int) -> tuple[float, float] | None:
    """(wall-clock seconds, device hours) of all, `parallel` at a time; None unless every one is known."""
    known = [one for one in estimates if one is not None]
    if not known or len(known) < len(estimates):
        return None
    lanes = [0.0] * max(1, parallel)
    for one in known:  # each cell begins where a lane is free first, as the runner does it
        lanes[lanes.index(min(lanes))] += one.seconds
    return max(lanes), sum(one.device_hours for one in known)


@dataclass(frozen=True)
class LaunchJudge:
    """What judges cells as a launch would. facts: of this machine; nodes elsewhere are asked when a cell starts."""

    facts: MachineFacts
    planner: MemoryPlanner
    force: bool = False

    def settle(self, config: RunConfig) -> RunConfig:
        """With ranks and backend where this machine runs it; checked with its number of ranks, if that is known."""
        if runner_for(config.cluster).is_here:
            config, _ = with_ranks(config, self.facts)
        check_config(config)
        if config.cluster.world_size is not None:
            check_attention(config, group_topology(config))
        return config

    def shortage(self, config: RunConfig) -> str | None:
        """The first sentence of what a launch would refuse with; None where machines are not known yet."""
        if self.force or not runner_for(config.cluster).is_here:
            return None
        settled = _with_attention(config, self.planner)
        if settled is None:
            return None
        try:
            problems = check_memory(settled, self.planner, force=True).problems
        except (ConfigError, RunError):
            return None  # the launch of the cell says it better, and it is that cell's result
        return problems[0] if problems else None

    def estimate(self, config: RunConfig) -> Estimate | None:
        """What it takes."""
        return estimate(config, self.planner)
