"""Small models and a plain attention for the tests of the model."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from engine.config.settings import ModelConfig
from engine.model.init import init_weights
from engine.model.llama import LlamaModel

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=48,
    ffn_hidden_size=72,
    num_layers=3,
    num_heads=6,
    num_kv_heads=6,
    head_dim=8,
    init_std=0.3,  # large, so that every part of the model matters in a comparison
)
SHAPES = {
    "mha": SMALL,
    "gqa": replace(SMALL, num_kv_heads=2),
    "tied": replace(SMALL, num_kv_heads=3, tie_embeddings=True),
    "wide_heads": replace(SMALL, head_dim=16, rope_theta=500000.0),
    "biases": replace(SMALL, num_kv_heads=2, qkv_bias=True),
    "head_norms": replace(SMALL, num_kv_heads=2, head_dim=16, qk_norm=True),
}


def visible_attention(visible: Tensor):  # type: ignore[no-untyped-def]
    """Attention function with explicit matmuls; query t sees key s iff visible[t, s]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return attend


def causal_attention(tokens: int):  # type: ignore[no-untyped-def]
    """Causal attention function over `tokens` rows in order."""
    return visible_attention(torch.ones(tokens, tokens, dtype=torch.bool).tril())


def build(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaModel:
    """An initialised model on the CPU, by way of the meta device."""
    with torch.device("meta"):
        model = LlamaModel(config)
    model.to_empty(device="cpu")
    model = model.to(dtype)
    init_weights(model, seed)
    randomise_vectors(model)
    return model


@torch.no_grad()
def randomise_vectors(model: LlamaModel) -> None:
    """Gives biases and norms of heads, which begin alike, values that a comparison sees."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype) / 3
            )


def make_tokens(config: ModelConfig, batch: int, tokens: int) -> Tensor:
    """[batch, tokens] random token ids."""
    return torch.randint(0, config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(1))
