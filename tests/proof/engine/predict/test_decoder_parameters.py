"""Counts of parameters by a config.json, against models of transformers on the meta device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from testkit.hub_models import FAMILIES, hf_config

from engine.predict.flops import count_parameters
from engine.pretrained.decoder_shape import read_decoder

pytestmark = pytest.mark.thorough  # transformers takes long to import

LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "head_dim": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "nemotron": {},
}
NORMS = {"llama", "mixtral", "qwen3_moe", "granite", "granitemoe", "phi3", "qwen2", "qwen3", "smollm3", "ministral3"}


def parameters(document: dict[str, Any]) -> dict[str, torch.Size]:
    import transformers

    stated = {name: value for name, value in document.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(document["model_type"], **stated)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def document_of(family: str) -> dict[str, Any]:
    import transformers

    if family in FAMILIES:
        known = transformers.AutoConfig.for_model(family).to_dict()
        return {name: value for name, value in hf_config(family).items() if name in known}

    stated = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    stated |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    stated = OTHERS[family] if family == "gpt2" else {**stated, **OTHERS[family]}
    return transformers.AutoConfig.for_model(family, **{"vocab_size": 64, **stated}).to_dict()


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_matrices_of_layers_are_counted_exactly(family: str) -> None:
    document = document_of(family)
    count = count_parameters(read_decoder(document, family, is_complete=True).model)
    shapes = [
        shape for name, shape in parameters(document).items() if re.search(r"\.\d+\.", name) and "bias" not in name
    ]
    assert count.layer_matmuls == sum(shape.numel() for shape in shapes if len(shape) > 1)


@pytest.mark.parametrize("family", sorted(NORMS))
def test_all_parameters_are_counted_exactly(family: str) -> None:
    document = document_of(family)
    count = count_parameters(read_decoder(document, family, is_complete=True).model)
    assert count.total == sum(shape.numel() for shape in parameters(document).values())


def test_a_token_is_multiplied_with_its_experts_alone() -> None:
    count = count_parameters(read_decoder(document_of("mixtral"), "mixtral", is_complete=True).model)
    idle = 4 * 2 * 3 * 32 * 48  # layers, experts beyond those of a token, matrices of 32 x 48
    assert count.layer_matmuls - count.active_layer_matmuls == idle
