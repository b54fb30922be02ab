"""Tiny models of transformers: their config.json, our settings of their shape, and the same model in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from engine.config.settings import AttentionConfig, ModelConfig, RunConfig
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.model.init import local_block
from engine.pretrained.decoder_shape import read_decoder
from testkit.tiny_training import accumulated, full_weights, own_part, start_run, tiny_config, whole

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
_LATENT: Mapping[str, Any] = {  # queries and keys are as wide as both parts together, values are narrower
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA: Mapping[str, Any] = {  # more heads of v than of k
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
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
    "seed_oss": {"residual_dropout": 0.0},
    "exaone4": {"sliding_window": 6},
    "starcoder2": {"sliding_window": None},
    "minimax_m2": _EXPERTS,
    "ministral3": {},
    "gpt_oss": {**_EXPERTS, "sliding_window": 6},
    "granite_swa": {"attention_multiplier": 0.5, "sliding_window": 6},
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "deepseek_v3": {**_EXPERTS, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
WITH_AUXILIARY_LOSS = ("qwen3_moe", "qwen3_next", "mixtral", "granitemoe", "minimax_m2", "gpt_oss")


def hf_config(family: str, **more: Any) -> dict[str, Any]:
    """config.json of a tiny model of a family, whole."""
    wanted = {**_COMMON, **FAMILIES[family], **more}
    known = transformers.AutoConfig.for_model(family).to_dict()
    stated = {
        name: value for name, value in wanted.items() if name in known or name in FAMILIES[family] or name in more
    }
    document: dict[str, Any] = transformers.AutoConfig.for_model(family, **stated).to_dict()
    return {name: value for name, value in document.items() if name != "transformers_version"}


def shape_of(document: Mapping[str, Any]) -> ModelConfig:
    """Our settings of the shape of a config.json."""
    return read_decoder(document, str(document["model_type"]), is_complete=True).model


def masks_of(document: Mapping[str, Any], **attention: Any) -> AttentionConfig:
    """Attention with the sliding windows of a config.json."""
    found = read_decoder(document, str(document["model_type"]), is_complete=True)
    return AttentionConfig(mask_layers=found.mask_layers, window_tokens=found.window_tokens, **attention)


def reference_model(
    document: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None, attention: str = "eager"
) -> Any:
    """The model of transformers in one process, with these weights.

    Its attention is eager and fp32; `another`: that of torch, or for models that have none eager in float64.
    """
    stated = {name: value for name, value in document.items() if name not in ("model_type", "dtype", "torch_dtype")}
    config = transformers.AutoConfig.for_model(document["model_type"], **stated)
    name = "eager" if attention == "eager" or not _has_sdpa(config) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=name)
    if attention == "another" and name == "eager":
        model = model.double()
        model.set_experts_implementation("eager")  # the only one in float64
    if weights is not None:
        missing = model.load_state_dict(dict(weights), strict=False)
        assert not missing.unexpected_keys, missing
    return model.train()


def _has_sdpa(config: Any) -> bool:
    kind = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return bool(kind._supports_sdpa)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 5) -> None:
    """Give what begins alike (norms, biases, buffers that are trained for) values that a comparison sees.

    Values are those of the whole tensors, whatever part of them this rank holds.
    """
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            continue
        generator = torch.Generator().manual_seed(seed + len(name))
        values = 0.2 * torch.randn(parameter.shape, generator=generator)
        local, starts = local_block(parameter)
        if name.endswith("A_log"):  # a decay of a few percent per row, so that states last over ranks
            local.fill_(-3.0)
        local.add_(values[tuple(slice(at, at + n) for at, n in zip(starts, local.shape, strict=True))])


def hub_config(family: str, *, attention: Mapping[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A tiny run of a family, with its auxiliary loss where it has one, except over packed documents."""
    more: dict[str, Any] = dict(sections.pop("hf", {}))
    attention = attention or {}
    if family in WITH_AUXILIARY_LOSS and not attention.get("documents"):
        more |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    document = hf_config(family, **more)
    return tiny_config(model=shape_of(document), attention=masks_of(document, **attention), **sections)


def document_of(config: RunConfig) -> dict[str, Any]:
    """The config.json of a run."""
    assert config.model.hf_config is not None
    return dict(config.model.hf_config)


@dataclass(frozen=True)
class Facts:
    """Of one step over a batch: every weight, the mean loss, and every gradient, all whole."""

    weights: dict[str, Tensor]
    loss: float
    gradients: dict[str, Tensor]


def step_facts(config: RunConfig, batch: Batch) -> Facts:
    """Those of the trainer, with every norm and bias random. Collective over the ranks of the pool."""
    run = start_run(config)
    randomise(run.model)
    weights = full_weights(run.model)
    loss, labels = accumulated(run, own_part(batch, run.mesh))
    gradients = {name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
    return Facts(weights, loss.item() / labels, gradients)


def reference_facts(config: RunConfig, batch: Batch, weights: Mapping[str, Tensor], attention: str = "eager") -> Facts:
    """Those of transformers in one process; packed documents are separate forward passes."""
    document = document_of(config)
    model = reference_model(document, weights, attention)
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    starts = batch.documents[0].tolist() if config.attention.documents else [0]
    # Another order of sums in the gated delta rule, whose decays are differences of sums in fp32.
    options = {"chunk_size": 4} if attention == "another" and "linear_conv_kernel_dim" in document else {}
    total = torch.zeros(())
    for first, after in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
        logits = model(input_ids=tokens[:, first:after], use_cache=False, **options).logits
        total = total + F.cross_entropy(logits.flatten(0, 1), labels[:, first:after].flatten(), reduction="sum")
    mean = total / int((labels != IGNORE_INDEX).sum())
    auxiliary = torch.zeros(())
    if document.get("output_router_logits"):
        assert starts == [0], "the auxiliary loss of separate forward passes is another one"
        auxiliary = document["router_aux_loss_coef"] * model(input_ids=tokens, use_cache=False, **options).aux_loss
    (mean + auxiliary).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Facts(dict(weights), mean.item(), gradients)


def assert_equal_facts(found: Facts, config: RunConfig, batch: Batch) -> None:
    """Fails unless the trainer's loss and gradients are those of one process of transformers.

    Every gradient to 1e-5, or to 3 times what two attentions of transformers differ by; the norm of all to 1e-5.
    """
    expected = reference_facts(config, batch, found.weights)
    other = reference_facts(config, batch, found.weights, "another")
    assert found.loss == pytest.approx(expected.loss, rel=1e-5), "loss"
    assert found.gradients.keys() == expected.gradients.keys(), "parameters with a gradient"
    floor = 1e-6 * _norm(expected.gradients.values())  # such as the bias of keys, whose gradient is 0
    for name, gradient in expected.gradients.items():
        scale = gradient.norm().item() + floor
        noise = 3 * (other.gradients[name] - gradient).norm().item() / scale
        error = (found.gradients[name] - gradient).norm().item() / scale
        assert error < max(1e-5, noise), f"gradient of {name} is off by {error:.1e}, two attentions by {noise / 3:.1e}"
    assert _norm(found.gradients.values()) == pytest.approx(_norm(expected.gradients.values()), rel=1e-5)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


@torch.no_grad()
def randomise_adapters(model: nn.Module) -> None:
    """Give adapters, half of which begin with 0, random values, whatever part of them this rank holds."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            local, starts = local_block(parameter)
            local.add_(values[tuple(slice(at, at + n) for at, n in zip(starts, local.shape, strict=True))])
