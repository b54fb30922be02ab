"""Whether a cell can run, fits, and what it takes: what a launch would find out, asked for every cell beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from burst_cli.memory_check import MemoryPlanner, check_memory
from burst_cli.plan_candidates import flops_of, group_topology
from burst_cli.sweep.estimate import ASSUMED_CORE_FLOPS, Estimate, Measured, Work, estimate
from cluster.facts import NodeFacts
from cluster.plan import choose_backend
from engine.attention.auto import check_attention
from engine.attention.presets import resolve_attention
from engine.config import RunConfig
from engine.config_checks import check_config
from engine.devices import published_peak
from engine.errors import ConfigError, RunError


@dataclass(frozen=True)
class LaunchJudge:
    """See `CellJudge`. facts: of this machine, for runs on it; nodes elsewhere are asked when a cell starts."""

    facts: NodeFacts
    planner: MemoryPlanner
    measured: Sequence[Measured]
    force: bool = False

    def settle(self, config: RunConfig) -> RunConfig:
        """With ranks and backend where this machine runs it; checked with its number of ranks, if that is known."""
        if is_local(config):
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
        if self.force or config.cluster.world_size is None or not is_local(config):
            return None
        try:
            problems = check_memory(self.planner.settle_attention(config), self.planner, force=True).problems
        except (ConfigError, RunError):
            return None  # the launch of the cell says it better, and it is that cell's result
        return problems[0] if problems else None

    def estimate(self, config: RunConfig) -> Estimate | None:
        """From runs like it, else from the peak of the device."""
        if config.cluster.world_size is None:
            return None
        work = work_of(self.planner.settle_attention(config))
        return estimate(work, self.measured, self._peak(config))

    def _peak(self, config: RunConfig) -> float | None:
        train = config.train
        if train.peak_flops_per_device is not None:
            return train.peak_flops_per_device
        try:
            known = published_peak(self.planner.capacity(config).device_name, train.compute_dtype)
        except ConfigError:
            return None
        if known is None and config.cluster.backend == "gloo":
            return ASSUMED_CORE_FLOPS * (config.cluster.threads_per_rank or 1)
        return known.flops_per_s if known is not None else None


def is_local(config: RunConfig) -> bool:
    """Whether the ranks of `config` run on this machine."""
    cluster = config.cluster
    return cluster.launcher == "local" or (cluster.launcher == "auto" and cluster.nodes is None)


def work_of(config: RunConfig) -> Work:
    """What a run of the settled `config` computes, by the counts of `engine.flops`."""
    world_size, group = config.cluster.world_size, group_topology(config)
    assert world_size is not None
    preset = resolve_attention(config, group).preset
    flops = flops_of(config, group).hardware
    return Work(config.model.name, preset, config.train.seq_len, world_size, config.train.steps, float(flops))
