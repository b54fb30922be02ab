"""Presets: every published method as a named point on the axes of distributed attention.

Standard library only, so that the command line checks legality without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.attention.topology import Topology
from engine.config import AttentionConfig, Dtype, LayoutName, ModelConfig, PresetName, RunConfig
from engine.errors import ConfigError

BYTES_OF: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Preset:
    """A named point; sizes of None follow the topology ("local" ranks inside, "nodes" outside)."""

    layout: LayoutName
    backward_circulates: Literal["kv", "q", "auto"]
    ring: Literal["none", "flat", "topology"]
    description: str


PRESETS: dict[PresetName, Preset] = {
    "single": Preset("contiguous", "kv", "none", "one rank holds the whole sequence"),
    "ring": Preset("zigzag", "kv", "flat", "RingAttention with zigzag balance: K,V and dK,dV circulate"),
    "striped": Preset("striped", "kv", "flat", "Striped Attention: token i on rank i mod P, K,V circulate"),
    "burst": Preset("zigzag", "auto", "topology", "BurstAttention: double ring along the nodes, Q/dQ/dO may circulate"),
}


@dataclass(frozen=True)
class AttentionMethod:
    """A legal, fully resolved method: what the planners need besides mask and shapes."""

    preset: PresetName
    layout: LayoutName
    ring_inner_size: int
    ring_outer_size: int
    backward_circulates: Literal["kv", "q"]
    gradient_wire_dtype: Dtype
    reason: str  # why this operand circulates in backward

    @property
    def cp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ring_inner_size * self.ring_outer_size


def hop_bytes_per_token(model: ModelConfig, *, wire_bytes: int, gradient_bytes: int) -> dict[str, int]:
    """Bytes that one token costs on one backward hop, for kv and for q circulation.

    kv: K, V and dK, dV. q: Q, dO, dQ and the two fp32 numbers (lse, surrogate scale) per query head.
    """
    kv_width = model.num_kv_heads * model.head_dim
    q_width = model.num_heads * model.head_dim
    return {
        "kv": 2 * kv_width * (wire_bytes + gradient_bytes),
        "q": q_width * (2 * wire_bytes + gradient_bytes) + 8 * model.num_heads,
    }


def choose_circulation(
    requested: Literal["kv", "q", "auto"], model: ModelConfig, payload_dtype: Dtype, gradient_dtype: Dtype
) -> tuple[Literal["kv", "q"], str]:
    """What circulates in backward and why: the operand that costs fewer bytes per hop when `auto` is asked for."""
    cost = hop_bytes_per_token(model, wire_bytes=BYTES_OF[payload_dtype], gradient_bytes=BYTES_OF[gradient_dtype])
    figures = f"per token and hop: kv {cost['kv']} B, q {cost['q']} B"
    if requested != "auto":
        return requested, f"{requested} as configured ({figures})"
    group = model.num_heads // model.num_kv_heads
    heads = "multi-head attention" if group == 1 else f"grouped-query attention with {group} query heads per kv head"
    choice: Literal["kv", "q"] = "q" if cost["q"] < cost["kv"] else "kv"
    return choice, f"auto: {choice} is cheaper for {heads} ({figures})"


def resolve_attention(config: RunConfig, topology: Topology) -> AttentionMethod:
    """The configured preset with its overrides as a legal method on the ranks of `topology`, which share one sequence.

    Raises ConfigError with every violated rule.
    """
    attention, model, train = config.attention, config.model, config.train
    cp_size, seq_len = topology.size, train.seq_len
    preset = PRESETS[attention.preset]
    inner, outer = _ring_sizes(attention, preset, cp_size, topology)
    problems = _ring_problems(attention, inner, outer, cp_size)
    if seq_len < cp_size:
        problems.append(f"train.seq_len: got {seq_len} tokens for {cp_size} ranks; every rank needs at least one")
    if problems:
        raise ConfigError(problems)
    gradient_dtype: Dtype = attention.gradient_wire_dtype or "float32"
    requested = attention.backward_circulates or preset.backward_circulates
    circulates, reason = choose_circulation(requested, model, train.compute_dtype, gradient_dtype)
    return AttentionMethod(
        preset=attention.preset,
        layout=attention.layout or preset.layout,
        ring_inner_size=inner,
        ring_outer_size=outer,
        backward_circulates=circulates,
        gradient_wire_dtype=gradient_dtype,
        reason=reason,
    )


def _ring_sizes(attention: AttentionConfig, preset: Preset, cp_size: int, topology: Topology) -> tuple[int, int]:
    inner, outer = attention.ring_inner_size, attention.ring_outer_size
    if inner is None and outer is None:
        if preset.ring == "topology" and topology.size == cp_size:
            return topology.local_ranks, topology.nodes
        return (1, 1) if preset.ring == "none" else (cp_size, 1)
    if inner is None:
        assert outer is not None
        return max(1, cp_size // outer), outer
    return inner, outer if outer is not None else max(1, cp_size // inner)


def _ring_problems(attention: AttentionConfig, inner: int, outer: int, cp_size: int) -> list[str]:
    if attention.preset == "single" and cp_size > 1:
        return [
            f"attention=single holds the whole sequence on one rank, but {cp_size} ranks share it; "
            "set parallel.cp_size=1 (and parallel.dp_shard_size to the number of ranks) or choose attention=burst"
        ]
    if inner * outer == cp_size:
        return []
    legal = ", ".join(f"{w}x{cp_size // w}" for w in range(1, cp_size + 1) if cp_size % w == 0)
    return [
        f"attention ring: inner {inner} x outer {outer} = {inner * outer} ranks, but {cp_size} ranks share a sequence; "
        f"legal inner x outer: {legal}"
    ]
