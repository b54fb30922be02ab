"""Whether a configuration can run, fits, and what it takes: what a launch would find out, for every cell beforehand.

What it takes is told by runs that were measured, else by the prediction for a known machine.

The time of a step is its FLOPs over a rate: that of the run most like the cell. Same model, ranks and device are a
must; then the same method, then the nearest length (rates change with the length of a sequence). Without such a run it
is the step that `burst plan` predicts of the machine; without a known one there is no estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from burst_cli.plan.candidates import group_topology
from burst_cli.plan.memory_check import MemoryPlanner, check_memory
from burst_cli.values import seconds_between
from cluster.facts import MachineFacts
from cluster.launch.runner import runner_for
from cluster.plan import choose_backend
from engine.config.errors import ConfigError, RunError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.memory.cost import planned_flops
from engine.planning.methods.auto import check_attention
from engine.planning.methods.presets import legal_attention
from engine.planning.time.step_time import StepTime

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
class Work:
    """What a cell has to do. flops_per_step: over all ranks, recomputation included."""

    model: str
    preset: str
    seq_len: int
    world_size: int
    steps: int
    flops_per_step: float


@dataclass(frozen=True)
class Measured:
    """A run that ended well: how fast it worked, and how long it took beside its steps."""

    run_id: str
    model: str
    preset: str
    seq_len: int
    world_size: int
    flops_per_s: float
    start_s: float


def measured_runs(records: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """The completed runs among `records` (see `run_records.run_record`) that say enough."""
    found = []
    for record in records:
        flops, step_s = (record.get("flops_per_step") or {}).get("hardware"), record.get("step_time_s")
        known = all(record.get(name) for name in ("model", "attention_preset", "seq_len", "world_size"))
        if record.get("status") == "completed" and flops and step_s and known:
            found.append(
                Measured(
                    str(record["run_id"]),
                    str(record["model"]),
                    str(record["attention_preset"]),
                    int(record["seq_len"]),
                    int(record["world_size"]),
                    flops / step_s,
                    _start_s(record, step_s),
                )
            )
    return found


def estimate(work: Work, measured: Sequence[Measured], predict: Callable[[], StepTime | None]) -> Estimate | None:
    """What `work` is expected to take; `predict` is asked where no run is like it, and may know no machine."""
    like = [run for run in measured if (run.model, run.world_size) == (work.model, work.world_size)]
    if like:
        best = min(like, key=lambda run: (run.preset != work.preset, abs(math.log(run.seq_len / work.seq_len))))
        step_s = work.flops_per_step / best.flops_per_s
        source = f"the rate of run {best.run_id} ({best.preset}, {best.seq_len})"
        return Estimate(best.start_s + work.steps * step_s, work.world_size, source, step_s)
    step = predict()
    if step is None:
        return None
    seconds, source = ASSUMED_START_S + work.steps * step.seconds, f"the prediction for {step.machine}"
    return Estimate(seconds, work.world_size, source, step.seconds)


def total(estimates: Sequence[Estimate | None], parallel: int) -> tuple[float, float] | None:
    """(wall-clock seconds, device hours) of all, `parallel` at a time; None unless every one is known."""
    known = [one for one in estimates if one is not None]
    if not known or len(known) < len(estimates):
        return None
    lanes = [0.0] * max(1, parallel)
    for one in known:  # each cell begins where a lane is free first, as the runner does it
        lanes[lanes.index(min(lanes))] += one.seconds
    return max(lanes), sum(one.device_hours for one in known)


def _start_s(record: Mapping[str, Any], step_s: float) -> float:
    """Seconds of a run that were no steps: start, data, validation."""
    whole_s = seconds_between(record.get("started_at"), record.get("ended_at") or "")
    return ASSUMED_START_S if whole_s is None else max(0.0, whole_s - step_s * int(record.get("steps") or 0))


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
            backend = choose_backend(config, self.facts)
            cluster = replace(
                config.cluster,
                backend=backend.name,  # type: ignore[arg-type]
                ranks_per_node=backend.local_ranks,
                threads_per_rank=backend.threads_per_rank,
            )
            config = replace(config, cluster=cluster)
        check_config(config)
        if config.cluster.world_size is not None:
            check_attention(config, group_topology(config))
        return config

    def shortage(self, config: RunConfig) -> str | None:
        """The first sentence of what a launch would refuse with; None where machines are not known yet."""
        if self.force or config.cluster.world_size is None or not runner_for(config.cluster).is_here:
            return None
        try:
            problems = check_memory(self.planner.settle_attention(config), self.planner, force=True).problems
        except (ConfigError, RunError):
            return None  # the launch of the cell says it better, and it is that cell's result
        return problems[0] if problems else None

    def estimate(self, config: RunConfig) -> Estimate | None:
        """From runs like it, else from the prediction."""
        if config.cluster.world_size is None:
            return None
        settled = self.planner.settle_attention(config)
        return estimate(work_of(settled), self.measured, lambda: self.planner.predict_time(settled))


def work_of(config: RunConfig) -> Work:
    """What a run of the settled `config` computes, by the counts of `engine.planning.time.flops`."""
    world_size, group = config.cluster.world_size, group_topology(config)
    assert world_size is not None
    method = legal_attention(config, group)
    groups = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    flops = planned_flops(config, method, groups).hardware
    return Work(config.model.name, method.preset, config.train.seq_len, world_size, config.train.steps, float(flops))
