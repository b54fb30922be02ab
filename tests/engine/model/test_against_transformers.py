"""The same weights in transformers' models of Llama, Qwen 2 and Qwen 3 give the same logits, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import SHAPES, build, causal_attention, make_tokens
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.config.settings import ModelConfig
from engine.model.llama import LlamaModel

# fp32 through three layers: rounding differs by the order of sums only.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
BATCH, TOKENS = 2, 33


def hugging_face_name(name: str) -> str:
    """The name in transformers of one of our parameters."""
    if name.startswith("embedding."):
        return name.replace("embedding.", "model.embed_tokens.")
    if name.startswith("head."):
        return name.replace("head.", "lm_head.")
    return f"model.{name}"


def build_peer(config: ModelConfig, ours: LlamaModel) -> Any:
    """transformers' model of the same shape with the weights of `ours`."""
    kind: Any = LlamaForCausalLM
    settings: Any = LlamaConfig
    if config.qkv_bias:
        kind, settings = Qwen2ForCausalLM, Qwen2Config
    if config.qk_norm:
        kind, settings = Qwen3ForCausalLM, Qwen3Config
    peer = kind(
        settings(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=1024,
            attn_implementation="sdpa",
        )
    )
    theirs = dict(peer.named_parameters())
    names = {hugging_face_name(name): parameter for name, parameter in ours.named_parameters()}
    assert theirs.keys() == names.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            theirs[name].copy_(parameter)
    return peer


def shifted(tokens: Tensor) -> Tensor:
    """Labels of `tokens` [B, T]: the token that follows; none after the last."""
    return torch.cat([tokens[:, 1:], torch.full((tokens.shape[0], 1), -100)], dim=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_are_those_of_transformers(shape: str) -> None:
    config = SHAPES[shape]
    ours = build(config)
    peer = build_peer(config, ours)
    tokens = make_tokens(config, BATCH, TOKENS)
    labels = shifted(tokens)

    hidden = ours(tokens, torch.arange(TOKENS), causal_attention(TOKENS))
    mean_loss = ours.head(hidden, labels) / (labels != -100).sum()
    mean_loss.backward()
    theirs = peer(input_ids=tokens, labels=tokens)
    theirs.loss.backward()

    torch.testing.assert_close(ours.head.logits(hidden), theirs.logits, **TOLERANCE)
    torch.testing.assert_close(mean_loss, theirs.loss, **TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[hugging_face_name(name)], **TOLERANCE)
