"""Configurations resolved for ranks that need not exist, as a launch would."""

from __future__ import annotations

from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.attention import AttentionPreview, preview_attention
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, machine_of
from engine.predict.step_time import predict_step
from engine.resolve.attention import resolve_attention
from engine.resolve.degrees import sequence_topology


def method_of(config: RunConfig, group: Topology, machine: Machine | None = None) -> AttentionMethod:
    """The method of ranks that share one sequence; machine: None: the configured one."""
    return resolve_attention(config, group, machine or machine_of(config))


def preview_of(
    config: RunConfig, group: Topology, machine: Machine, ranks: tuple[int, ...] | None = None
) -> AttentionPreview:
    """What that method does."""
    return preview_attention(config, method_of(config, group, machine), group, machine, ranks)


def step_of(config: RunConfig, world: Topology, machine: Machine) -> StepTime:
    """The predicted step of a run whose memory policy is named."""
    return predict_step(config, method_of(config, sequence_topology(config, world), machine), world, machine)
