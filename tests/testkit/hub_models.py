"""Tiny models of transformers: their config.json, our settings of their shape, and the same model in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.schema import JsonObject
from engine.config.settings import AttentionConfig, ModelConfig

_COMMON: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_WINDOWS: Mapping[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**_EXPERTS, "sliding_window": None},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "glm4": {},
    "glm4_moe": {**_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "granite": {"attention_multiplier": 0.5, "logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "granitemoe": {**_EXPERTS, "attention_multiplier": 0.5},
    "phi3": {},
    "smollm3": {},
    "cohere2": _WINDOWS,
    "seed_oss": {},
    "exaone4": {"sliding_window": 6},
    "starcoder2": {"sliding_window": None},
    "minimax_m2": _EXPERTS,
    "ministral3": {},
}


def hf_config(family: str, **more: Any) -> dict[str, Any]:
    """config.json of a tiny model of a family, whole."""
    import transformers

    wanted = {**_COMMON, **FAMILIES[family], **more}
    known = transformers.AutoConfig.for_model(family).to_dict()
    stated = {
        name: value for name, value in wanted.items() if name in known or name in FAMILIES[family] or name in more
    }
    document: dict[str, Any] = transformers.AutoConfig.for_model(family, **stated).to_dict()
    return {name: value for name, value in document.items() if name != "transformers_version"}


def shape_of(document: Mapping[str, Any]) -> ModelConfig:
    """Our settings of the shape of a config.json."""
    return ModelConfig(
        name=str(document["model_type"]),
        implementation="hf",
        hf_config=JsonObject(document),
        vocab_size=document["vocab_size"],
        hidden_size=document["hidden_size"],
        ffn_hidden_size=document.get("intermediate_size") or 48,
        num_layers=document["num_hidden_layers"],
        num_heads=document["num_attention_heads"],
        num_kv_heads=document["num_key_value_heads"],
        head_dim=document.get("head_dim") or document["hidden_size"] // document["num_attention_heads"],
        tie_embeddings=document.get("tie_word_embeddings", False),
    )


def masks_of(document: Mapping[str, Any], **attention: Any) -> AttentionConfig:
    """Attention with the sliding windows of a config.json."""
    kinds = document.get("layer_types") or ()
    window = document.get("sliding_window")
    layers = tuple("window" if kind == "sliding_attention" else "causal" for kind in kinds)
    if "window" in layers and window:
        return AttentionConfig(mask_layers=layers, window_tokens=window, **attention)
    return AttentionConfig(**attention)


def reference_model(document: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> Any:
    """The model of transformers in one process, with eager attention, fp32, and these weights."""
    import transformers

    stated = {name: value for name, value in document.items() if name not in ("model_type", "dtype", "torch_dtype")}
    config = transformers.AutoConfig.for_model(document["model_type"], **stated)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if weights is not None:
        missing = model.load_state_dict(dict(weights), strict=False)
        assert not missing.unexpected_keys, missing
    return model.train()


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 5) -> None:
    """Give what begins alike (norms, biases, buffers that are trained for) values that a comparison sees.

    Values are those of the whole tensors, whatever part of them this rank holds.
    """
    from engine.model.init import local_block

    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            continue
        generator = torch.Generator().manual_seed(seed + len(name))
        values = 0.2 * torch.randn(parameter.shape, generator=generator)
        local, starts = local_block(parameter)
        local.add_(values[tuple(slice(at, at + n) for at, n in zip(starts, local.shape, strict=True))])
