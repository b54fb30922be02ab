"""Settings of layers without attention. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.schema import setting


@dataclass(frozen=True)
class LinearLayersConfig:
    """Layers without attention: a gated delta rule behind a short convolution, or the convolution alone."""

    num_layers: int = setting(0, "hf: layers without attention", "layers", at_least=0)
    num_key_heads: int = setting(0, "hf: heads of q and k; 0: a convolution alone", "heads", at_least=0)
    num_value_heads: int = setting(0, "hf: heads of v and of the state", "heads", at_least=0)
    key_head_dim: int = setting(0, "hf: size of one head of q and k", at_least=0)
    value_head_dim: int = setting(0, "hf: size of one head of v", at_least=0)
    conv_kernel: int = setting(0, "hf: rows that the convolution sees", "tokens", at_least=0)
