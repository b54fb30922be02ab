"""Which parameters are trained: counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.model_parts import LoraConfig
from engine.config.settings import MemoryConfig, ModelConfig, RunConfig
from engine.predict.flops import attention_pairs, count_parameters, step_flops
from engine.predict.policy_cost import state_bytes
from engine.predict.room import checkpoint_bytes
from engine.predict.trained import trained_parameters

# Two layers, the second of 4 experts; q 32 x 32, k and v 32 x 16, feed-forward 48, experts and shared expert 16 wide.
SHAPE = ModelConfig(
    implementation="hf",
    vocab_size=64,
    hidden_size=32,
    ffn_hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_moe_layers=1,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=16,
    shared_expert_ffn_hidden_size=16,
)
Q, KV, FFN, SHARED = 32 + 32, 32 + 16, 32 + 48, 32 + 16  # inputs + outputs


def trained(**lora: Any) -> int:
    return trained_parameters(replace(SHAPE, lora=LoraConfig(rank=2, **lora)))


def test_without_adapters_all_parameters_are_trained() -> None:
    assert trained_parameters(SHAPE) == count_parameters(SHAPE).total


def test_adapters_of_all_linear_layers_are_also_on_router_and_experts() -> None:
    experts = 4 * (2 * (32 + 32) + (16 + 32))  # gate and up of an expert are one tensor, with twice the rank
    assert trained() == 2 * (2 * (Q + 2 * KV + Q) + 3 * FFN + 3 * SHARED + (32 + 4) + experts)


def test_adapters_of_chosen_modules_are_counted_alone() -> None:
    assert trained(target_modules=("q_proj", "self_attn.v_proj")) == 2 * 2 * (Q + KV)


def test_dora_adds_a_length_per_output() -> None:
    assert trained(target_modules=("k_proj",), dora=True) == 2 * (2 * KV + 16)


def test_every_expert_has_an_adapter_of_its_own() -> None:
    assert trained(target_modules=("q_proj",), target_parameters=("mlp.experts.gate_up_proj",)) == 4 * Q + 4 * 2 * (
        32 + 32
    )


def test_a_target_without_a_known_name_counts_as_all_linear_layers() -> None:
    assert trained(target_modules=("query_key_value",)) == trained()


def test_frozen_weights_have_no_states_and_are_in_no_checkpoint() -> None:
    assert state_bytes(MemoryConfig(), 1000, 10) == 4 * 1000 + 12 * 10
    model = replace(SHAPE, lora=LoraConfig(rank=2))
    assert checkpoint_bytes(RunConfig(model=model)) == 12 * trained_parameters(model)


def test_backward_skips_gradients_of_frozen_weights() -> None:
    flops = {
        rank: step_flops(
            replace(SHAPE, lora=LoraConfig(rank=rank)), seq_len=64, visible_pairs=2 * attention_pairs("causal", 64)
        )
        for rank in (None, 2)
    }
    assert flops[None].model - flops[2].model == 2 * count_parameters(SHAPE).matmul * 64


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_adapters_of_latent_attention(q_lora_rank: int | None) -> None:
    latent = {"head_dim": 12, "v_head_dim": 6, "kv_lora_rank": 16, "rope_head_dim": 4, "q_lora_rank": q_lora_rank}
    model = replace(SHAPE, num_moe_layers=0, lora=LoraConfig(rank=1), **latent)  # type: ignore[arg-type]
    queries = 32 + 48 if q_lora_rank is None else (32 + 12) + (12 + 48)
    attention = queries + (32 + 20) + (16 + 4 * (8 + 6)) + (24 + 32)
    assert trained_parameters(model) == 2 * (attention + 3 * FFN)
