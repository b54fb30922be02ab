"""From configuration to one frozen method: legal, and where the preset leaves it free, the fastest by prediction.

A backward pass may circulate keys and values or queries, and may keep local tiles until the last gradients come home
between nodes. Both are choices of time, so the plans of all choices are replayed on the machine. What is plainest is
taken unless another choice is predicted to save more than TIE_TOLERANCE: predictions say nothing below that, and plain
plans have fewer and larger tiles.

Pure functions of configuration, topology and machine, so every rank comes to the same method.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import (
    PRESETS,
    AttentionMethod,
    Circulated,
    leaves_direction_free,
    legal_attention,
    moving_operand_reason,
)
from engine.planning.schedules.plan import plan_backward, token_bytes_of
from engine.planning.topology import Topology
from engine.planning.visibility.visible import Visibility
from engine.predict.machine import Machine, machine_of
from engine.predict.replay import replay

TIE_TOLERANCE = 0.02
# Choices for larger groups are compared in one of this size, with as many ranks per node and as many tokens per rank.
PROXY_RANKS = 16


def resolve_attention(config: RunConfig, topology: Topology, machine: Machine | None = None) -> AttentionMethod:
    """The configured preset with its overrides as a legal method on the ranks of `topology`, which share one sequence.

    machine   on which choices that the preset leaves free are predicted; None: the configured one

    Raises ConfigError with every violated rule and the nearest legal degrees.
    """
    method = legal_attention(config, topology)
    choices = _choices(config.attention, method, topology)
    if len(choices) == 1:
        return method
    # Of what is kept only the border between what is and is not computed again matters to a plan.
    plain = MemoryConfig()
    cut = replace(plain, activation_checkpoint="seq_fraction", saved_fraction=config.memory.saved_fraction)
    config = replace(config, memory=cut if method.split_at else plain)
    return _fastest(config, topology, machine or machine_of(config), tuple(choices))


def proxy_topology(config: RunConfig, topology: Topology, most_ranks: int) -> tuple[RunConfig, Topology]:
    """A smaller group with as many ranks per node and tokens per rank; those given, where they have `most_ranks`."""
    lists_blocks = "blocks" in (config.attention.mask, *config.attention.mask_layers)  # of the whole length
    if topology.size <= most_ranks or lists_blocks:
        return config, topology
    nodes = max(2, PROXY_RANKS // topology.local_ranks) if topology.nodes > 1 else 1
    smaller = Topology(nodes, min(topology.local_ranks, PROXY_RANKS // nodes))
    seq_len = config.train.seq_len * smaller.size // topology.size
    return replace(config, train=replace(config.train, seq_len=seq_len)), smaller


def scaled_down(
    attention: AttentionConfig, method: AttentionMethod, topology: Topology, small: Topology
) -> AttentionConfig:
    """The method's settings for the smaller group that stands for the whole one."""
    if small == topology:
        return attention
    heads = math.gcd(method.head_parallel_size, small.local_ranks)
    inner = small.local_ranks // heads if method.ring_outer_size > 1 else small.size // heads
    outer = small.size // heads // inner
    return replace(attention, head_parallel_size=heads, ring_inner_size=inner, ring_outer_size=outer)


_Choice = tuple[Circulated, int]  # what circulates in backward, local tiles that are deferred


def _choices(attention: AttentionConfig, method: AttentionMethod, topology: Topology) -> list[_Choice]:
    """What the preset leaves free, the plainest first. Inside one node the last hop is too short to hide it."""
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
def _fastest(config: RunConfig, topology: Topology, machine: Machine, choices: tuple[_Choice, ...]) -> AttentionMethod:
    """The first choice that no other one beats by more than TIE_TOLERANCE in the backward passes of all layers.

    Documents, which only the data know, are one sequence.
    """
    method = legal_attention(config, topology)
    small, group = proxy_topology(config, topology, PROXY_RANKS)
    try:
        proxy = legal_attention(replace(small, attention=scaled_down(config.attention, method, topology, group)), group)
    except ConfigError:  # what only the whole group can be
        small, group, proxy = config, topology, method
    layer_pattern = attention_layers(small, proxy)
    blocks, token_bytes = divide_run(small, proxy, layer_pattern), token_bytes_of(small, proxy)
    layers = Counter(layer_pattern[index % len(layer_pattern)].mask for index in range(small.model.num_layers))
    seen = [(count, Visibility(mask, blocks.ring)) for mask, count in layers.items()]

    def backward_s(choice: _Choice) -> float:
        chosen, seconds = _with(proxy, choice), 0.0
        for count, visibility in seen:
            plan = plan_backward(chosen, visibility, blocks)
            seconds += count * replay(plan, machine, token_bytes, group).total_s
        return seconds

    seconds = {choice: backward_s(choice) for choice in choices}
    least = min(seconds.values())
    best = next(choice for choice in choices if seconds[choice] <= least * (1 + TIE_TOLERANCE))
    told = ", ".join(f"{c}{f' with {n} deferred' if n else ''} {s:.3g} s" for (c, n), s in seconds.items())
    return replace(_with(method, best), reason=f"auto: {moving_operand_reason(config, *best)} ({told})")


def _with(method: AttentionMethod, choice: _Choice) -> AttentionMethod:
    circulates, deferred = choice
    return replace(method, backward_circulates=circulates, deferred_local_tiles=deferred)
