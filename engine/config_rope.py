"""Settings of rotary positions beyond the length that a model was trained on, under model.rope_scaling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config_schema import note

RopeScalingKind = Literal["none", "linear", "ntk", "yarn", "llama3"]


@dataclass(frozen=True)
class RopeScalingConfig:
    """How the wavelengths of RoPE are stretched; formulas in engine/model/rope.py."""

    kind: RopeScalingKind = field(
        default="none",
        metadata=note(
            "linear: all alike (Chen et al. 2023); ntk: by a larger base; yarn: long ones only, and sharper attention "
            "(Peng et al. 2023); llama3: the rule of Llama 3.1"
        ),
    )
    factor: float = field(default=1.0, metadata=note("how much longer sequences become", at_least=1))
    original_seq_len: int | None = field(
        default=None, metadata=note("length the model was trained on; yarn and llama3 need it", "tokens", at_least=1)
    )
    beta_fast: float = field(
        default=32.0, metadata=note("yarn: pairs that turn more often than this in the original length stay", above=0)
    )
    beta_slow: float = field(
        default=1.0, metadata=note("yarn: pairs that turn less often than this are stretched by the factor", above=0)
    )
    attention_factor: float | None = field(
        default=None, metadata=note("yarn: multiplies queries and keys; null: 0.1 ln(factor) + 1", above=0)
    )
    low_freq_factor: float = field(
        default=1.0, metadata=note("llama3: wavelengths above original_seq_len / this are stretched", above=0)
    )
    high_freq_factor: float = field(
        default=4.0, metadata=note("llama3: wavelengths below original_seq_len / this stay", above=0)
    )
