"""Whether a configuration can run, fits, and what it takes: what a launch would find out, for every cell beforehand.

The time of a step is the engine's prediction, corrected by what a run that was measured took beside its own: that most
like the cell. Same model, ranks and rates of prediction are a must; then the same method, then the nearest length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from burst_cli.plan.memory_check import MemoryPlanner, check_memory, group_topology
from cluster.facts import MachineFacts
from cluster.launch.runner import runner_for
from cluster.plan import with_ranks
from cluster.values import number, seconds_between, text, whole
from engine.config.errors import ConfigError, RunError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.methods.auto import check_attention

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


@dataclass(frozen=True)
class Measured:
    """A run that ended well. slowness: its steps by their prediction, which was made by the rates of `machine`.

    start_s: what it took beside its steps.
    """

    run_id: str
    model: str
    preset: str
    seq_len: int
    world_size: int
    machine: str
    slowness: float
    start_s: float


def measured_runs(records: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """The completed runs among `records` (see `burst_cli.runs.read.run_record`) that say enough."""
    found = []
    for record in records:
        step_s, predicted_s = number(record, "step_time_s"), number(record, "predicted_step_time_s")
        model, preset = text(record, "model"), text(record, "attention_preset")
        machine = text(record, "predicted_step_machine")
        seq_len, ranks = whole(record, "seq_len"), whole(record, "world_size")
        if not (step_s and predicted_s and machine and model and preset and seq_len and ranks):
            continue
        if record.get("status") == "completed":
            took_s = seconds_between(record.get("started_at"), record.get("ended_at") or "")
            steps_s = step_s * (whole(record, "steps") or 0)
            start_s = ASSUMED_START_S if took_s is None else max(0.0, took_s - steps_s)
            slowness = step_s / predicted_s
            found.append(Measured(str(record["run_id"]), model, preset, seq_len, ranks, machine, slowness, start_s))
    return found


def most_like(config: RunConfig, machine: str, measured: Sequence[Measured]) -> Measured | None:
    """The run that says most of this configuration; None where no run has its model, ranks and rates."""
    wanted = (config.model.name, config.cluster.world_size, machine)
    like = [run for run in measured if (run.model, run.world_size, run.machine) == wanted]
    preset, seq_len = config.attention.preset, config.train.seq_len
    return min(like, key=lambda run: (run.preset != preset, abs(math.log(run.seq_len / seq_len))), default=None)


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
    measured: Sequence[Measured]
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
        settled = self._with_attention(config) if not self.force and runner_for(config.cluster).is_here else None
        if settled is None:
            return None
        try:
            problems = check_memory(settled, self.planner, force=True).problems
        except (ConfigError, RunError):
            return None  # the launch of the cell says it better, and it is that cell's result
        return problems[0] if problems else None

    def _with_attention(self, config: RunConfig) -> RunConfig | None:
        """With attention=auto settled; None where the ranks are not known, or no method suits them."""
        if config.cluster.world_size is None:
            return None
        try:
            return self.planner.settle_attention(config)
        except (ConfigError, RunError):
            return None

    def estimate(self, config: RunConfig) -> Estimate | None:
        """None where the ranks are not known, or a step cannot be predicted."""
        ranks, settled = config.cluster.world_size, self._with_attention(config)
        step = None if settled is None else self.planner.predict_time(settled)
        if ranks is None or settled is None or step is None:
            return None
        run, source = most_like(settled, step.machine, self.measured), f"the prediction for {step.machine}"
        if run is None:
            return Estimate(ASSUMED_START_S + config.train.steps * step.seconds, ranks, source, step.seconds)
        step_s, source = step.seconds * run.slowness, f"{source}, corrected by run {run.run_id}"
        source += f" ({run.preset}, {run.seq_len})"
        return Estimate(run.start_s + config.train.steps * step_s, ranks, source, step_s)
