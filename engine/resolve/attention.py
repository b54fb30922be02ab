"""Resolve a legal configuration into one frozen attention method; open choices are predicted. No torch.

attention=auto selects the best of all legal methods. A named preset may leave open the moving operand of backward, and
how many local tiles are deferred until the last gradients return to their owners from other nodes. These choices affect
time only, so the plans of all choices are replayed on the machine model. The simplest choice wins unless another one is
predicted to save more than a tolerance: smaller differences are within the error of predictions, and simple plans have
fewer and larger tiles.

Pure functions of configuration, topology and machine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import PRESETS, AttentionMethod, Circulated, leaves_direction_free
from engine.planning.schedules.plan import plan_backward, token_bytes_of
from engine.planning.topology import Topology
from engine.planning.visibility.visible import Visibility
from engine.predict.attention import MOST_RANKS_PLANNED, AttentionPreview
from engine.predict.machine import Machine
from engine.predict.replay import replay
from engine.predict.step_time import replayed_attention
from engine.resolve.decisions import Decision, Rule
from engine.resolve.legality import legal_attention, legal_methods

MOVING_OPERAND_TOLERANCE = 0.02  # for the moving operand and the deferred tiles
METHOD_TOLERANCE = 0.01  # for methods: within it the one with the smallest buffers wins
# Choices for larger groups are compared on a group of this size with the same ranks per node and tokens per rank.
PROXY_RANKS = 16
# For larger groups only this many methods are planned at full size: one second each for 256 ranks.
FINALISTS = 2


@dataclass(frozen=True)
class MethodCandidate:
    """A legal method and its predicted cost over all layers and passes of one sequence."""

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


def select_preset(config: RunConfig, topology: Topology, machine: Machine) -> tuple[AttentionConfig, Decision]:
    """Return the attention settings with `auto` replaced by the best preset; a named preset is returned unchanged.

    Args:
        config: A legal configuration. Under memory=auto the policy that recomputes all attention is assumed.
        topology: The ranks that share one sequence.
        machine: Device and links for which times are predicted.

    Raises:
        ConfigError: No method is legal; its problems are the rules that every method violates.
    """
    name = config.attention.preset
    if name != "auto":
        return config.attention, Decision("attention.preset", name, Rule.CONFIGURED)
    candidates = rank_methods(config, topology, machine)
    best = candidates[0]
    figures = {"seconds": best.seconds, "exposed_s": best.exposed_s, "candidates": len(candidates)}
    decision = Decision("attention.preset", best.method.preset, Rule.FASTEST, figures, tuple(candidates))
    return best.attention, decision


def rank_methods(config: RunConfig, topology: Topology, machine: Machine) -> list[MethodCandidate]:
    """Return every legal method, best first; in a large group FINALISTS. Raises ConfigError as `legal_methods`."""
    legal = legal_methods(config, topology)
    small, group = proxy_group(config, topology, MOST_RANKS_PLANNED)
    if group != topology:
        finalists = _predicted(small, group, machine, legal, whole=topology)[:FINALISTS]
        legal = [(finalist.attention, finalist.method) for finalist in finalists]
    ordered = _predicted(config, topology, machine, legal)
    near = [c for c in ordered if c.seconds <= ordered[0].seconds * (1 + METHOD_TOLERANCE)]
    best = min(near, key=lambda candidate: candidate.buffer_bytes)
    return [best, *(candidate for candidate in ordered if candidate is not best)]


def _predicted(
    config: RunConfig,
    topology: Topology,
    machine: Machine,
    methods: Sequence[tuple[AttentionConfig, AttentionMethod]],
    *,
    whole: Topology | None = None,
) -> list[MethodCandidate]:
    """Return the candidates for methods, fastest first.

    whole: the real ranks of the methods, if `topology` is a smaller proxy group; each method is then scaled down to it.

    Raises ConfigError when none of them can be planned.
    """
    found: list[MethodCandidate] = []
    problems: list[str] = []
    for attention, method in methods:
        try:
            if whole is None:
                trial = replace(config, attention=attention)
                method, _ = circulate(trial, method, topology, machine)
                preview = replayed_attention(trial, method, topology, machine)
            else:
                trial = replace(config, attention=scaled_attention(attention, method, topology))
                scaled = resolve_attention(trial, topology, machine)
                preview = replayed_attention(trial, scaled, topology, machine)
        except ConfigError as error:  # an impossible mask, or a group that has no smaller proxy
            problems += error.problems
            continue
        found.append(_candidate(attention, method, preview))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def _candidate(attention: AttentionConfig, method: AttentionMethod, preview: AttentionPreview) -> MethodCandidate:
    buffers = max(one.largest_buffers.buffer_bytes("device") for layer in preview.layers for one in layer.passes)
    return MethodCandidate(attention, method, preview.time.seconds, preview.time.exposed_s, buffers)


def resolve_attention(config: RunConfig, topology: Topology, machine: Machine) -> AttentionMethod:
    """Return the configured preset with its overrides as a legal method, which `select_moving_operand` chooses."""
    return select_moving_operand(config, topology, machine)[0]


def select_moving_operand(config: RunConfig, topology: Topology, machine: Machine) -> tuple[AttentionMethod, Decision]:
    """Return the configured preset with its overrides as a legal method, and the decision about its moving operand.

    Args:
        config: A configuration that names a preset.
        topology: The ranks that share one sequence.
        machine: Device and links for which times are predicted.

    Raises:
        ConfigError: Lists every violated rule and the nearest legal degrees.
    """
    return circulate(config, legal_attention(config, topology), topology, machine)


def circulate(
    config: RunConfig, method: AttentionMethod, topology: Topology, machine: Machine
) -> tuple[AttentionMethod, Decision]:
    """Return the legal `method` of `config` with the fastest values of open settings, and why."""
    choices = moving_choices(config.attention, method, topology)
    if len(choices) == 1:
        return method, Decision(_CIRCULATES, method.backward_circulates, Rule.CONFIGURED)
    # Only the border between recomputed and saved rows affects a plan.
    plain = MemoryConfig()
    cut = replace(plain, activation_checkpoint="seq_fraction", saved_fraction=config.memory.saved_fraction)
    config = replace(config, memory=cut if method.split_at else plain)
    best, seconds = _fastest(config, method, topology, machine, tuple(choices))
    method = replace(method, backward_circulates=best[0], deferred_local_tiles=best[1])
    figures = {_choice_name(choice): value for choice, value in zip(choices, seconds, strict=True)}
    return method, Decision(_CIRCULATES, best[0], Rule.FASTEST, figures)


def proxy_group(config: RunConfig, topology: Topology, most_ranks: int) -> tuple[RunConfig, Topology]:
    """Return a smaller group with the same ranks per node and tokens per rank; unchanged up to `most_ranks` ranks."""
    lists_blocks = "blocks" in (config.attention.mask, *config.attention.mask_layers)  # they cover the whole sequence
    if topology.size <= most_ranks or lists_blocks:
        return config, topology
    nodes = max(2, PROXY_RANKS // topology.local_ranks) if topology.nodes > 1 else 1
    smaller = Topology(nodes, min(topology.local_ranks, PROXY_RANKS // nodes))
    seq_len = config.train.seq_len * smaller.size // topology.size
    return replace(config, train=replace(config.train, seq_len=seq_len)), smaller


def proxy_method(
    config: RunConfig, method: AttentionMethod, topology: Topology
) -> tuple[RunConfig, AttentionMethod, Topology]:
    """Config, method and ranks of a group of at most PROXY_RANKS that stands for this one, or these themselves."""
    small, group = proxy_group(config, topology, PROXY_RANKS)
    if group == topology:
        return config, method, topology
    try:
        attention = scaled_attention(config.attention, method, group)
        return small, legal_attention(replace(small, attention=attention), group), group
    except ConfigError:  # what only the whole group can be
        return config, method, topology


def scaled_attention(attention: AttentionConfig, method: AttentionMethod, small: Topology) -> AttentionConfig:
    """Return the method's settings for the smaller proxy group."""
    heads = math.gcd(method.head_parallel_size, small.local_ranks)
    inner = small.local_ranks // heads if method.ring_outer_size > 1 else small.size // heads
    outer = small.size // heads // inner
    return replace(attention, head_parallel_size=heads, ring_inner_size=inner, ring_outer_size=outer)


_CIRCULATES = "attention.backward_circulates"
MovingChoice = tuple[Circulated, int]  # moving operand of backward, number of deferred local tiles


def _choice_name(choice: MovingChoice) -> str:
    circulates, deferred = choice
    return f"{circulates}, {deferred} deferred" if deferred else circulates


def moving_choices(attention: AttentionConfig, method: AttentionMethod, topology: Topology) -> list[MovingChoice]:
    """Return the choices that the preset leaves open, simplest first. In one node the last hop is too short to hide."""
    free = leaves_direction_free(attention) and method.chunk_tokens is None
    ring_size = method.ring_inner_size * method.ring_outer_size
    defers = PRESETS[attention.preset].defers_local_tiles and method.chunk_tokens is None
    if ring_size == 1 or method.backward_order == "reversed":
        free, defers = False, False
    levels = (method.ring_inner_size > 1) + (method.ring_outer_size > 1)
    deferred = range(levels + 1) if defers and topology.nodes > 1 else range(1)
    directions: tuple[Circulated, ...] = ("kv", "q") if free else (method.backward_circulates,)
    return [(direction, count) for count, direction in itertools.product(deferred, directions)]


@functools.lru_cache(maxsize=64)
def _fastest(
    config: RunConfig, method: AttentionMethod, topology: Topology, machine: Machine, choices: tuple[MovingChoice, ...]
) -> tuple[MovingChoice, tuple[float, ...]]:
    """Return the first choice that no other beats by more than the tolerance, and the seconds of every choice.

    Seconds are those of the backward passes of all layers. Documents are not known before the data are read, so one
    sequence is assumed.
    """
    small, proxy, group = proxy_method(config, method, topology)
    layers = attention_layers(small, proxy)
    blocks, token_bytes = divide_run(small, proxy, layers), token_bytes_of(small, proxy)
    counts = Counter(layers[index % len(layers)].mask for index in range(small.model.num_layers))
    seen = [(count, Visibility(mask, blocks.ring)) for mask, count in counts.items()]

    def backward_s(choice: MovingChoice) -> float:
        circulates, deferred = choice
        chosen, seconds = replace(proxy, backward_circulates=circulates, deferred_local_tiles=deferred), 0.0
        for count, visibility in seen:
            plan = plan_backward(chosen, visibility, blocks)
            seconds += count * replay(plan, machine, token_bytes, group).total_s
        return seconds

    seconds = tuple(map(backward_s, choices))
    least = min(seconds) * (1 + MOVING_OPERAND_TOLERANCE)
    best = next(choice for choice, value in zip(choices, seconds, strict=True) if value <= least)
    return best, seconds


def check_attention(config: RunConfig, topology: Topology) -> None:
    """Raise ConfigError for a method or a mask that the ranks of `topology` would refuse; chooses nothing."""
    attention = config.attention
    if attention.preset == "auto":
        attention, method = legal_methods(config, topology)[0]
    else:
        method = legal_attention(config, topology)
    attention_layers(replace(config, attention=attention), method)
