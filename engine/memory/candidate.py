"""A checkpoint policy on trial: what it is estimated, or predicted, to need and to cost. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.config.settings import MemoryConfig, RunConfig
from engine.memory.capacity import Capacity
from engine.memory.estimate import MemoryEstimate, estimate_memory
from engine.memory.fit import Fit, Predict, Prediction, fit_of, method_on
from engine.memory.kept import PolicyCost, policy_cost
from engine.memory.policy import policy_name
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Machine
from engine.planning.time.step_time import extra_seconds

# The closed form is within about a tenth of the exact prediction; a policy must fit although it were so much larger.
MARGIN = 0.1


@dataclass(frozen=True)
class MemoryCandidate:
    """A policy with what it is estimated to need and to cost.

    extra_s      seconds that it adds to a step in which nothing is computed again or moved
    prediction   the exact one, where it was asked for; `fit` is then its
    """

    memory: MemoryConfig
    method: AttentionMethod
    estimate: MemoryEstimate
    cost: PolicyCost
    extra_s: float
    fit: Fit
    prediction: Prediction | None = None

    @property
    def closed_form_error(self) -> float:
        """By how much of it the exact prediction is larger."""
        assert self.prediction is not None
        return self.prediction.needed_bytes / self.estimate.needed_bytes - 1

    @property
    def fits(self) -> bool:
        """On the device and on the host."""
        return self.fit.fits

    @property
    def name(self) -> str:
        """The policy in words that name its settings."""
        return policy_name(self.memory)

    @property
    def settings(self) -> str:
        """The policy as overrides."""
        memory = self.memory
        names = ["activation_checkpoint", "activation_store"]
        names += ["host_layers"] * (memory.host_layers is not None)
        names += ["kept_fraction"] * (memory.activation_checkpoint == "seq_fraction")
        names += ["every_layers"] * (memory.activation_checkpoint == "attn_out_every")
        names += ["tile_tokens"] * (memory.tile_tokens is not None) + ["optimizer_store"]
        return " ".join(f"memory.{name}={getattr(memory, name)}" for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for tables and JSON."""
        memory, best = self.memory, self.prediction or self.estimate
        return {
            "name": self.name,
            "activation_checkpoint": memory.activation_checkpoint,
            "kept_fraction": memory.kept_fraction if memory.activation_checkpoint == "seq_fraction" else None,
            "every_layers": memory.every_layers if memory.activation_checkpoint == "attn_out_every" else None,
            "activation_store": memory.activation_store,
            "host_layers": memory.host_layers,
            "tile_tokens": memory.tile_tokens,
            "optimizer_store": memory.optimizer_store,
            "device_peak_bytes": best.device_peak_bytes,
            "needed_bytes": best.needed_bytes,
            "host_peak_bytes": best.host_peak_bytes,
            "kept_bytes": self.cost.kept_bytes,
            "moved_bytes": self.cost.moved_bytes,
            "recompute_linear_flops": self.cost.linear_flops,
            "recompute_attention_flops": self.cost.attention_flops,
            "extra_s": self.extra_s,
            "fits": self.fits,
            "fits_device": self.fit.device,
            "fits_host": self.fit.host,
            "by": "closed_form" if self.prediction is None else "fake_step",
        }


@dataclass(frozen=True)
class Scope:
    """Where policies are on trial: a run whose attention is settled, its ranks, the memory and the speed they have."""

    config: RunConfig
    world: Topology
    capacity: Capacity
    machine: Machine

    def estimated(self, memory: MemoryConfig) -> MemoryCandidate:
        """One policy in closed form. Raises ConfigError where the configuration cannot run with it."""
        tried = replace(self.config, memory=memory)
        method = method_on(tried, self.world)
        cost = policy_cost(tried, method)
        estimate = estimate_memory(tried, method, cost)
        extra_s = extra_seconds(tried, self.world, cost, self.machine)
        return MemoryCandidate(memory, method, estimate, cost, extra_s, fit_of(estimate, self.capacity, MARGIN))

    def predicted(self, candidate: MemoryCandidate, predict: Predict) -> MemoryCandidate:
        """The candidate predicted exactly."""
        prediction = predict(replace(self.config, memory=candidate.memory), self.world)
        return replace(candidate, prediction=prediction, fit=fit_of(prediction, self.capacity))
