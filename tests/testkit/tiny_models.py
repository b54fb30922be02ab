"""transformers' causal language models, tiny and random, on one process and divided among ranks.

Every norm weight, bias and learnable sink is drawn anew: at their initial 0 or 1 a wrong gradient of them may not show.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import ContextParallel
from engine.attention.hugging_face import enable_context_parallel, model_heads, shift_labels
from engine.config.settings import KvForm

SEQ_LEN, VOCAB = 37, 97
DOCUMENTS = (0, 11, 29)
SMALLEST_NORM = 1e-6  # whole gradients are 10 and more: a smaller one, as that of a bias of keys, is rounding
MAX_PARAMETERS = 4_000_000  # of a family whose config does not know the names below
RATES = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "layerdrop")
MORE_RATES = ("attention_probs_dropout_prob", "hidden_dropout_prob", "router_jitter_noise", "input_jitter_noise")
LAST_RATES = ("activation_dropout", "dropout_rate", "embed_dropout", "residual_dropout", "resid_dropout")
# Whichever of these names a config has.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys((*RATES, *MORE_RATES, *LAST_RATES, "classifier_dropout", "hidden_dropout_rate"), 0.0),
    **{"vocab_size": VOCAB, "head_dim": 8, "sliding_window": 6, "num_experts_per_tok": 2, "moe_layer_freq": 1},
    **{"initializer_range": 0.3, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
    # latent attention
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_group": 1, "topk_group": 1},
    # linear attention and state spaces
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 4},
    **{"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "mamba_dt_rank": 4, "state_size": 8},
    **{"expand": 2, "mamba_expand": 2, "block_multiple_of": 8, "block_auto_adjust_ff_dim": False},
}
WINDOW_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOWED_QWEN = {"use_sliding_window": True, "max_window_layers": 2}
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
DEEPSEEK = {"first_k_dense_replace": 1, "n_shared_experts": 1, **LATENT}
# What some families need besides, or instead.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt_oss": WINDOW_AND_FULL,
    "flint": WINDOW_AND_FULL,
    "granite_swa": WINDOW_AND_FULL | {"attention_multiplier": 0.7},
    "granitemoe_swa": WINDOW_AND_FULL | {"attention_multiplier": 0.7},
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"] * 2, "v_head_dim": 6},
    "qwen2": WINDOWED_QWEN,
    "qwen3": WINDOWED_QWEN,
    "granite": {"attention_multiplier": 0.7},
    "granitemoe": {"attention_multiplier": 0.7},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    **dict.fromkeys(("glm4_moe_lite", "axk1", "axk2", "longcat_flash", "youtu", "minicpm3", "mistral4"), LATENT),
    "glm4_moe": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "layer_types": ["full_attention"] * 4},
    "phi3": {"original_max_position_embeddings": 256},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, **WINDOW_AND_FULL},
    "gemma3n_text": {
        **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
        **{"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None},
    },
    "gemma4_text": {
        **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
        **WINDOW_AND_FULL,
        "per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}},
    },
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48},
    "minimax": {"block_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    **{name: {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1} for name in ("lfm2", "lfm2_moe")},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": 6},
    "kimi_linear": {
        **{"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4, "num_shared_experts": 1},
        **{"num_experts_per_token": 2, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
}


class Trained(NamedTuple):
    """Loss of a batch, the gradient of every parameter that has one, and the norm of what this rank added to it."""

    loss: float
    gradients: dict[str, Tensor]
    shares: dict[str, float]

    @property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return float(torch.stack([gradient.double().norm() for gradient in self.gradients.values()]).norm())


def has(config: Any, name: str) -> bool:
    """Whether a config knows a name; of some names it says so by another error than AttributeError."""
    try:
        return hasattr(config, name)
    except RuntimeError:
        return True


def tiny_config(family: str) -> Any:
    """A config of four layers with four heads of 8, where the family has such settings."""
    base = AutoConfig.for_model(family)
    settings = {name: value for name, value in TINY.items() if has(base, name) or name == "pad_token_id"}
    settings |= OF_FAMILY.get(family, {})
    made = type(base)(**settings)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"):  # as long as the model
        default = getattr(base, name, None)
        if isinstance(default, list) and name not in settings and len(getattr(made, name)) != made.num_hidden_layers:
            settings[name] = (default * made.num_hidden_layers)[: made.num_hidden_layers]
    return type(base)(**settings)


def build(family: str) -> Any:
    """The model in fp32 with eager attention and the same random weights in every process."""
    config = tiny_config(family)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{family}: {count} parameters, for its config has other names than TINY")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").float().train()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                _randomise(parameter, generator)
            if name.endswith("A_log"):  # states that last over ranks; differences of sums of strong decays are noise
                parameter.sub_(parameter.mean() + 3)
    return model


def _randomise(parameter: Tensor, generator: torch.Generator) -> None:
    """Redraw what was not drawn at all, and spread what is constant."""
    noise = 0.2 * torch.randn(parameter.shape, generator=generator)
    if not parameter.isfinite().all() or parameter.abs().max() > 50:
        parameter.copy_(noise)
    elif parameter.numel() == 1 or parameter.std() < 1e-3:
        parameter.add_(noise)


def make_batch() -> tuple[Tensor, Tensor]:
    """Tokens [2, N], and labels of which some do not count."""
    tokens = torch.randint(3, 90, (2, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    return tokens, tokens.masked_fill(tokens % 7 == 0, -100)


def sum_loss(logits: Tensor, shifted: Tensor) -> Tensor:
    """Cross entropy of logits [B, T, vocabulary] and shifted labels [B, T], summed."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")


def train_alone(
    family: str, documents: tuple[int, ...], dtype: torch.dtype = torch.float32, *, rows_apart: bool = False
) -> Trained:
    """One process with eager attention; every document is a call of its own, and with `rows_apart` every sequence."""
    model, (tokens, labels) = build(family).to(dtype), make_batch()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products are of 32 bits at most
    count = int((shift_labels(labels, documents) != -100).sum())
    loss = torch.zeros(())
    for rows in ([0], [1]) if rows_apart else ([0, 1],):
        for start, stop in zip(documents, [*documents[1:], SEQ_LEN], strict=True):
            logits = model(input_ids=tokens[rows, start:stop], use_cache=False).logits
            loss = loss + sum_loss(logits.float(), shift_labels(labels[rows, start:stop])) / count
    loss.backward()
    return Trained(loss.item(), _gradients(model), {})


def train_divided(family: str, preset: str, documents: tuple[int, ...], kv_form: KvForm = "auto") -> Trained:
    """The ranks of this process group; the loss is this rank's share by the model's own loss."""
    model, (tokens, labels) = build(family), make_batch()
    heads = model_heads(model)[0]
    parallel = ContextParallel(**vars(heads), kv_form=kv_form, preset=preset, dtype=torch.float32)
    sharder = enable_context_parallel(model, parallel)
    loss = model(**sharder.shard_inputs(tokens, labels, documents=documents)).loss
    loss.backward()
    shares = {name: float(gradient.norm()) for name, gradient in _gradients(model).items()}
    parallel.sum_gradients(model.parameters())
    return Trained(loss.item(), _gradients(model) if parallel.rank == 0 else {}, shares)


class Alone(NamedTuple):
    """One process: in fp32, in float64, and in fp32 with the sequences of the batch apart."""

    plain: Trained
    exact: Trained
    rows_apart: Trained


def train_alone_thrice(family: str, documents: tuple[int, ...]) -> Alone:
    """What `differences` compares with, and two samples of what fp32 alone does."""
    exact = train_alone(family, documents, torch.float64)
    return Alone(train_alone(family, documents), exact, train_alone(family, documents, rows_apart=True))


def tolerances(alone: Alone) -> dict[str, float]:
    """Largest relative error per gradient: 1e-5, or 3 times the most that fp32 alone does to this tensor of any layer.

    Sums that cancel, as of a router's bias, have few digits left in fp32, and some layers are lucky.
    """
    noise: dict[str, float] = {}
    for sample in (alone.plain, alone.rows_apart):
        for name, gradient in sample.gradients.items():
            kind = re.sub(r"\d+", "*", name)
            noise[kind] = max(noise.get(kind, 0.0), distance(gradient, alone.exact.gradients[name]))
    return {name: max(1e-5, 3 * noise[re.sub(r"\d+", "*", name)]) for name in alone.plain.gradients}


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, or SMALLEST_NORM if b is smaller."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(SMALLEST_NORM))


def differences(got: list[Trained], alone: Alone) -> list[str]:
    """What of the ranks' results differs from one process; [] if nothing does."""
    want = alone.plain
    loss, gradients = sum(rank.loss for rank in got), got[0].gradients
    found = [f"loss {loss}, not {want.loss}"] if abs(loss - want.loss) > 1e-5 * abs(want.loss) else []
    if gradients.keys() != want.gradients.keys():
        return [*found, f"gradients of other parameters: {sorted(gradients.keys() ^ want.gradients.keys())}"]
    noise = max(1e-5 * want.norm, 3 * abs(want.norm - alone.exact.norm))
    if abs(got[0].norm - want.norm) > noise:
        found.append(f"the norm of the whole gradient is {got[0].norm}, not {want.norm}")
    limits = tolerances(alone)
    for name, gradient in want.gradients.items():
        # Shares of ranks may cancel: what is lost then is relative to them, and not to their sum.
        scale = max(float(gradient.norm()), SMALLEST_NORM, *(rank.shares.get(name, 0.0) for rank in got))
        error = float((gradients[name] - gradient).norm()) / scale
        if error > limits[name]:
            found.append(f"{name} is off by {error:.1e}")
    return found


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
