"""attention=auto: every legal method of a group of ranks, planned, replayed on a machine model, and ranked. No torch.

The ranking is a pure function of configuration, topology and machine, so every rank comes to the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, RunConfig
from engine.planning.methods.presets import AttentionMethod, legal_methods
from engine.planning.topology import Topology
from engine.predict.attention import MOST_RANKS_PLANNED, AttentionPreview
from engine.predict.machine import Machine, machine_of
from engine.predict.step_time import replayed_attention
from engine.resolve.attention import proxy_topology, scaled_down

# Methods for larger groups than are planned whole are first compared in one of PROXY_RANKS; so many of them are then
# planned as they are, which takes a second each for 256 ranks.
FINALISTS = 2
# Nearer than this, predictions say nothing, and the method with smaller buffers is taken.
TIE_TOLERANCE = 0.01


@dataclass(frozen=True)
class Candidate:
    """A legal method with what it is predicted to cost, all layers and passes of one sequence."""

    attention: AttentionConfig
    method: AttentionMethod
    seconds: float
    exposed_s: float
    buffer_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for tables and JSON."""
        method = self.method
        return {
            "preset": method.preset,
            "head_parallel_size": method.head_parallel_size,
            "ring_inner_size": method.ring_inner_size,
            "ring_outer_size": method.ring_outer_size,
            "layout": method.layout,
            "backward_circulates": method.backward_circulates,
            "seconds": self.seconds,
            "exposed_s": self.exposed_s,
            "buffer_bytes": self.buffer_bytes,
        }


@dataclass(frozen=True)
class Choice:
    """The configuration with the best method in place of auto, and all candidates, best first."""

    config: RunConfig
    candidates: tuple[Candidate, ...]

    @property
    def reason(self) -> str:
        """Why this one, in one sentence."""
        best, *others = self.candidates
        among = f"first of {len(self.candidates)} methods planned"
        against = f"; next {others[0].method.preset} {others[0].seconds:.3g} s" if others else ""
        return (
            f"auto: {best.method.preset} is predicted at {best.seconds:.3g} s per step of attention, "
            f"{best.exposed_s:.3g} s of it exposed communication, {among}{against}"
        )


def resolve_auto(config: RunConfig, topology: Topology, machine: Machine | None = None) -> Choice:
    """The best method for the ranks of `topology`, which share one sequence; a config that names its method is kept.

    Raises ConfigError when no method is legal, with the rules that every one of them violates.
    """
    if config.attention.preset != "auto":
        return Choice(config, ())
    machine = machine or machine_of(config)
    candidates = rank_methods(config, topology, machine)
    return Choice(replace(config, attention=candidates[0].attention), tuple(candidates))


def rank_methods(config: RunConfig, topology: Topology, machine: Machine) -> list[Candidate]:
    """Every legal method once, of a large group the FINALISTS, best first. Raises ConfigError as `legal_methods`."""
    legal = legal_methods(config, topology)
    small, group = proxy_topology(config, topology, MOST_RANKS_PLANNED)
    if group != topology:
        proxies = [(scaled_down(*one, topology, group), one) for one in legal]
        legal = [(c.attention, c.method) for c in _predicted(small, group, machine, proxies)[:FINALISTS]]
    ordered = _predicted(config, topology, machine, [(one[0], one) for one in legal])
    near = [c for c in ordered if c.seconds <= ordered[0].seconds * (1 + TIE_TOLERANCE)]
    best = min(near, key=lambda candidate: candidate.buffer_bytes)
    return [best, *(candidate for candidate in ordered if candidate is not best)]


def _predicted(
    config: RunConfig,
    topology: Topology,
    machine: Machine,
    methods: Sequence[tuple[AttentionConfig, tuple[AttentionConfig, AttentionMethod]]],
) -> list[Candidate]:
    """Candidates for methods, each given with the attention that is planned for it, fastest first.

    Raises ConfigError when none of them can be planned.
    """
    found: list[Candidate] = []
    problems: list[str] = []
    for planned, (attention, method) in methods:
        try:
            preview = replayed_attention(replace(config, attention=planned), topology, machine)
        except ConfigError as error:  # a mask that cannot be, or a smaller group that cannot stand for this one
            problems += error.problems
            continue
        found.append(_candidate(attention, preview.method if planned is attention else method, preview))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def _candidate(attention: AttentionConfig, method: AttentionMethod, preview: AttentionPreview) -> Candidate:
    buffers = max(one.largest_buffers.buffer_bytes("device") for layer in preview.layers for one in layer.passes)
    return Candidate(attention, method, preview.time.seconds, preview.time.exposed_s, buffers)
