"""transformers' hybrids under context parallelism equal the same models on one process, a call per document.

One process is compared with itself, too: by another chunk size, which computes the same in another order. Its distance
is the noise of float32, and three times as much is the tolerance of a tensor that is noisier than 1e-5.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from engine.attention import ContextParallel
from engine.attention.hugging_face import enable_context_parallel, model_heads, shift_labels
from engine.config.errors import ConfigError

HEADS, KV_HEADS, HEAD_DIM, VOCAB, SEQ_LEN = 4, 2, 8, 61, 48
DOCUMENTS = (0, 11, 13, 29)  # that begin inside a halo of shards of 12 rows, and 2 rows after each other
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "initializer_range": 0.1,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
DELTA: dict[str, Any] = SHAPE | {
    "head_dim": HEAD_DIM,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONV_TYPES = {"layer_types": ["conv", "full_attention"] * 2}
KIMI: dict[str, Any] = (
    SHAPE
    | EXPERTS
    | {
        "num_key_value_heads": HEADS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **{"linear_num_heads": 4, "linear_head_dim": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    }
)
MODELS: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**SHAPE, **CONV_TYPES),
    "lfm2_moe": Lfm2MoeConfig(**SHAPE, **CONV_TYPES, **EXPERTS, num_dense_layers=1),
    "lfm3": Lfm3Config(
        **SHAPE,
        head_dim=HEAD_DIM,
        sliding_window=6,
        layer_types=["conv", "sliding_attention", "full_attention", "conv"],
    ),
    "qwen3_next": Qwen3NextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_5": Qwen3_5TextConfig(**DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=16),
    "olmo_hybrid": OlmoHybridConfig(**{name: value for name, value in DELTA.items() if name != "head_dim"}),
    "kimi_linear": KimiLinearConfig(**KIMI),
}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ring x2": (2, {"preset": "ring"}),
    "burst x4": (4, {"preset": "burst", "nodes": 2}),
    "per document x2": (2, {"preset": "burst", "layout": "per_document"}),
    "balanced x4": (4, {"preset": "burst", "layout": "balanced"}),
    "ulysses x4": (4, {"preset": "ulysses"}),
    "loongtrain x4": (4, {"preset": "loongtrain", "nodes": 2}),
    "all-gather x4": (4, {"preset": "megatron_allgather"}),
    "burst x8": (8, {"preset": "burst", "nodes": 2}),
}


class Result(NamedTuple):
    loss: float
    logits: Tensor
    gradients: dict[str, Tensor]


def build(name: str) -> Any:
    """The model with the same random weights in every process; states that last over ranks."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation="eager").float().train()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=random)
            if parameter_name.endswith("A_log"):
                parameter.copy_(noise - 3)  # a decay of a few percent per row
            elif not torch.isfinite(parameter).all() or parameter_name.endswith("dt_bias"):
                parameter.copy_(noise)
            elif parameter.numel() == 1 or parameter.std() < 1e-3:  # norms and biases
                parameter.add_(noise)
    return model


def make_tokens() -> Tensor:
    return torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def one_process(name: str, documents: tuple[int, ...], **options: Any) -> Result:
    model, tokens = build(name), make_tokens()
    count = int((shift_labels(tokens, documents) != -100).sum())
    starts = documents or (0,)
    logits, loss = [], torch.zeros(())
    for start, stop in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
        part = tokens[:, start:stop]
        out = model(input_ids=part, use_cache=False, **options).logits
        labels = shift_labels(part).flatten()
        loss = loss + nn.functional.cross_entropy(out.flatten(0, 1), labels, reduction="sum") / count
        logits.append(out.detach())
    loss.backward()
    return Result(loss.item(), torch.cat(logits, 1), gradients(model))


def make_parallel(model: Any, **settings: Any) -> ContextParallel:
    (heads,) = model_heads(model)
    return ContextParallel(**vars(heads), dtype=torch.float32, **settings)


def over_ranks(name: str, documents: tuple[int, ...], settings: dict[str, Any], checkpoint: bool = False) -> Result:
    model, tokens = build(name), make_tokens()
    if checkpoint:
        model.activation_checkpointing_enable()
    parallel = make_parallel(model, **settings)
    sharder = enable_context_parallel(model, parallel)
    out = model(**sharder.shard_inputs(tokens, tokens, documents=documents))
    out.loss.backward()
    parallel.sum_gradients(model.parameters())
    return Result(out.loss.item(), sharder.context(SEQ_LEN, documents).gather(out.logits), gradients(model))


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-9))


def compare(results: list[Result], name: str, documents: tuple[int, ...]) -> None:
    want, other = one_process(name, documents), one_process(name, documents, chunk_size=4)
    assert sum(rank.loss for rank in results) == pytest.approx(want.loss, rel=1e-5)
    for rank in results:
        assert rank.gradients.keys() == want.gradients.keys()
        pairs = {"logits": (rank.logits, want.logits, other.logits)}
        for parameter, wanted in want.gradients.items():
            pairs[parameter] = rank.gradients[parameter], wanted, other.gradients[parameter]
        pairs["all gradients"] = tuple(  # type: ignore[assignment]
            torch.cat([result.gradients[parameter].flatten() for parameter in want.gradients])
            for result in (rank, want, other)
        )
        for quantity, (found, wanted, again) in pairs.items():
            assert distance(found, wanted) < max(1e-5, 3 * distance(again, wanted)), quantity


CASES = [
    ("lfm2", "all-gather x4", DOCUMENTS),
    ("lfm3", "burst x4", ()),
    ("qwen3_next", "burst x4", DOCUMENTS),
    ("qwen3_5", "balanced x4", DOCUMENTS),
    ("qwen3_5", "one rank", DOCUMENTS),
    ("qwen3_5_moe", "ulysses x4", ()),
    ("olmo_hybrid", "loongtrain x4", DOCUMENTS),
    ("kimi_linear", "burst x4", DOCUMENTS),
]
PRODUCT = list(itertools.product(MODELS, SETTINGS, [(), DOCUMENTS]))


@pytest.mark.parametrize(("name", "settings", "documents"), CASES)
def test_a_hybrid_equals_one_process(ranks: Any, name: str, settings: str, documents: tuple[int, ...]) -> None:
    size, axes = SETTINGS[settings]
    results = [over_ranks(name, documents, axes)] if size == 1 else ranks(size).run(over_ranks, name, documents, axes)
    compare(results, name, documents)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "settings", "documents"), [case for case in PRODUCT if case not in CASES])
def test_other_hybrids_equal_one_process(ranks: Any, name: str, settings: str, documents: tuple[int, ...]) -> None:
    test_a_hybrid_equals_one_process(ranks, name, settings, documents)


def test_activation_checkpointing_changes_nothing(ranks: Any) -> None:
    results = ranks(4).run(over_ranks, "qwen3_5", DOCUMENTS, {"preset": "ring"}, checkpoint=True)
    compare(results, "qwen3_5", DOCUMENTS)


def make_sharder(name: str, **settings: Any) -> tuple[Any, Any]:
    model = build(name)
    return model, enable_context_parallel(model, make_parallel(model, **settings))


def test_a_model_of_the_same_family_that_is_not_enabled_stays_as_it_is() -> None:
    other, tokens = build("qwen3_next"), make_tokens()
    before = other(input_ids=tokens).logits
    make_sharder("qwen3_next")
    assert torch.equal(other(input_ids=tokens).logits, before)


def test_an_enabled_model_refuses_a_call_without_a_sequence() -> None:
    model, _ = make_sharder("lfm2")
    with pytest.raises(ValueError, match=r"called without the arguments that InputSharder.shard_inputs returns"):
        model(input_ids=make_tokens(), use_cache=False)


def test_a_model_that_is_switched_back_generates() -> None:
    tokens = make_tokens()[:, :7]
    model, _ = make_sharder("qwen3_5")
    model.set_attn_implementation("sdpa")
    got = model.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, build("qwen3_5").generate(tokens, max_new_tokens=4, do_sample=False))


def test_layers_that_do_not_pass_the_sequence_on_are_refused() -> None:
    model, sharder = make_sharder("lfm2")
    layer = model.model.layers[0]
    forward = layer.conv.forward
    layer.conv.forward = lambda hidden_states, sequence=None, **options: forward(hidden_states, **options)
    with pytest.raises(ValueError, match="Lfm2ShortConv does not call 1 functions with the `sequence` that it gets"):
        model(**sharder.shard_inputs(make_tokens()))


def test_a_layout_without_runs_of_positions_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"conv layers need runs of consecutive positions .* choose zigzag"):
        make_sharder("lfm2", preset="striped")


def test_linear_layers_of_other_families_are_refused_by_name() -> None:
    config = BambaConfig(**SHAPE | {"attn_layer_indices": [1, 3]}, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8)
    model = AutoModelForCausalLM.from_config(config)
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    with pytest.raises(ConfigError, match=r"BambaForCausalLM: has (layers of type|Conv1d modules)"):
        enable_context_parallel(model, ContextParallel(**heads, dtype=torch.float32))
