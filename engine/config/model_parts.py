"""Settings of parts of a model: RoPE scaling, adapters, linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.schema import setting

RopeScalingKind = Literal["none", "linear", "ntk", "yarn", "llama3"]


@dataclass(frozen=True)
class RopeScalingConfig:
    """RoPE scaling for sequences longer than the model was trained on; formulas in engine/model/rope.py."""

    kind: RopeScalingKind = setting(
        "none",
        "linear: scale all wavelengths (Chen et al. 2023); ntk: a larger base; yarn: long wavelengths only, and an "
        "attention factor (Peng et al. 2023); llama3: the rule of Llama 3.1",
    )
    factor: float = setting(1.0, "factor by which sequences become longer", at_least=1)
    original_seq_len: int | None = setting(
        None, "length the model was trained on; yarn and llama3 need it", "tokens", at_least=1
    )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al. 2021), by the library peft; needs model.implementation=hf."""

    rank: int | None = setting(None, "rank of the adapters, which alone are trained; null: all weights are", at_least=1)
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", above=0)
    target_modules: tuple[str, ...] = setting(("all-linear",), "ends of names of the linear layers with an adapter")
    target_parameters: tuple[str, ...] = setting((), "ends of names of parameters with one: mlp.experts.down_proj")
    dora: bool = setting(False, "train the length of every output's weights on its own (Liu et al. 2024)")


@dataclass(frozen=True)
class LinearLayersConfig:
    """Layers without attention: a gated delta rule behind a short convolution, or the convolution alone."""

    num_layers: int = setting(0, "hf: layers without attention", "layers", at_least=0)
    num_key_heads: int = setting(0, "hf: heads of q and k; 0: a convolution alone", "heads", at_least=0)
    num_value_heads: int = setting(0, "hf: heads of v and of the state", "heads", at_least=0)
    key_head_dim: int = setting(0, "hf: size of one head of q and k", at_least=0)
    value_head_dim: int = setting(0, "hf: size of one head of v", at_least=0)
    conv_kernel: int = setting(0, "hf: rows that the convolution sees", "tokens", at_least=0)
