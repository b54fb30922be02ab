"""Settings of parts of a model: adapters, and layers without attention. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.schema import setting


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al. 2021), by the library peft; needs model.implementation=hf."""

    rank: int | None = setting(None, "rank of the adapters, which alone are trained; null: all weights are", at_least=1)
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", above=0)
    target_modules: tuple[str, ...] = setting(
        ("all-linear",), "names, or ends of names, of the linear layers with an adapter; all-linear: all but the head"
    )
    target_parameters: tuple[str, ...] = setting(
        (), "likewise of parameters without a linear layer of their own: experts, such as mlp.experts.gate_up_proj"
    )
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
