"""Shapes of transformers' decoders from their config.json: what is read, what is refused by name. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burst_cli.compose import compose
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MaskKind, ModelConfig, RunConfig
from engine.data.rules import file_rules
from engine.planning.topology import Topology
from engine.predict.flops import count_parameters
from engine.pretrained.decoder_shape import (
    contradictions,
    document_differences,
    read_decoder,
    repeating_layers,
    shortest_pattern,
    window_problems,
    with_num_layers,
)
from engine.resolve.legality import legal_attention

SMALL: dict[str, Any] = {
    "model_type": "mine",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def shape(**more: Any) -> ModelConfig:
    return read_decoder({**SMALL, **more}, "mine", is_complete=True).model


def problem(*, is_complete: bool = True, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_decoder(
            {key: value for key, value in {**SMALL, **more}.items() if value != "drop"}, "mine", is_complete=is_complete
        )
    return str(caught.value)


def preset(name: str) -> RunConfig:
    return compose([f"exp={name}", "data.tokenizer=bytes"]).config


PRESETS = ("qwen3_30b_a3b_1m", "gpt_oss_20b_128k", "gemma3_12b_128k", "qwen3_next_80b_256k")


@pytest.mark.parametrize("name", PRESETS)
def test_settings_of_presets_are_those_of_their_config_json(name: str) -> None:
    config = preset(name)
    assert config.model.hf_config is not None
    found = read_decoder(config.model.hf_config, config.model.name, is_complete=True)
    assert found.model == replace(config.model, require_init_from=False)
    assert found.mask_layers == (config.attention.mask_layers or ("causal",))
    assert found.window_tokens == config.attention.window_tokens


# Billions of parameters, and of those that are multiplied with a token, by the models' cards.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3_30b_a3b_1m", 30.5, 3.0),
        ("gpt_oss_20b_128k", 20.9, 3.6),
        ("gemma3_12b_128k", 11.8, 11.8),
        ("qwen3_8b_1m", 8.2, 7.6),
        ("qwen3_next_80b_256k", 79.7, 3.6),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, total: float, active: float) -> None:
    count = count_parameters(preset(name).model)
    assert (round(count.total / 1e9, 1), round(count.matmul / 1e9, 1)) == (total, active)


def test_sizes_are_found_by_their_aliases() -> None:
    document = {
        "model_type": "gpt2",
        "vocab_size": 100,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": None,
        "n_positions": 64,
    }
    model = read_decoder(document, "mine", is_complete=True).model
    assert (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads) == (32, 3, 4, 4)
    assert model.ffn_hidden_size == 128, "a feed-forward of GPT-2 without a width is four times the model's"


def test_layer_types_become_a_pattern_of_masks() -> None:
    found = read_decoder({**SMALL, **WINDOWS}, "mine", is_complete=True)
    assert found.mask_layers == ("window", "window", "causal")
    assert found.window_tokens == 6


def test_a_window_without_layer_types_is_that_of_all_layers() -> None:
    found = read_decoder({**SMALL, "sliding_window": 6}, "mine", is_complete=True)
    assert found.mask_layers == ("window",)


def test_first_dense_layers_have_no_experts() -> None:
    model = shape(**EXPERTS, first_k_dense_replace=2, n_shared_experts=1)
    assert (model.num_moe_layers, model.num_experts, model.experts_per_token) == (4, 8, 2)
    assert model.shared_expert_ffn_hidden_size == 16


def test_sparse_steps_and_dense_exceptions_choose_layers_of_experts() -> None:
    model = shape(**EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3])  # 1, 3 and 5, but for 3
    assert model.num_moe_layers == 2


def test_heads_of_latent_attention_are_those_that_attention_sees() -> None:
    model = shape(**LATENT, head_dim=4)  # head_dim: that of the rope part, in transformers
    assert (model.head_dim, model.v_head_dim, model.rope_head_dim) == (12, 6, 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": "drop", "tie_word_embeddings": "drop"}, "head_dim, tie_word_embeddings: not stated"),
        ({"sliding_window": 6}, "layer_types: not stated"),
        ({"model_type": "my_moe"}, "num_experts: not stated"),
    ],
)
def test_what_a_config_leaves_out_is_named(changes: dict[str, Any], text: str) -> None:
    assert text in problem(is_complete=False, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"text_config": {"model_type": "inner"}}, "save inner alone"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its weights are quantized (mxfp4)"),
        ({"layer_types": ["full_attention", "mamba"] * 3}, "layer_types has mamba"),
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads: got [2, 4], expected one whole number"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window is not set"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers: got 'six'"),
    ],
)
def test_what_plans_do_not_know_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    assert text in problem(**changes)


def test_settings_that_contradict_hf_config_are_named() -> None:
    model = replace(shape(**EXPERTS), num_heads=8, num_experts=4)
    assert list(contradictions(model)) == [
        "model.num_heads is 8, in model.hf_config 4",
        "model.num_experts is 4, in model.hf_config 8",
    ]


def test_settings_of_a_document_do_not_contradict_it() -> None:
    assert not [*contradictions(shape(**EXPERTS)), *contradictions(shape(**LATENT)), *contradictions(shape(**WINDOWS))]


def test_masks_that_are_not_the_windows_of_the_model_are_refused() -> None:
    document = {**SMALL, **WINDOWS}
    masks = AttentionConfig(mask_layers=("window", "window", "causal"), window_tokens=6)
    assert not list(window_problems(document, masks, 64))
    assert "set attention.mask_layers=[window,window,causal]" in next(window_problems(document, AttentionConfig(), 64))
    assert list(window_problems(document, replace(masks, window_tokens=7), 64)), "another window"


def test_causal_layers_are_as_good_as_a_window_of_the_whole_sequence() -> None:
    assert not list(window_problems({**SMALL, **WINDOWS}, AttentionConfig(), 6))


def test_other_weights_are_told_from_other_lengths() -> None:
    theirs = {**SMALL, "max_position_embeddings": 8192, "hidden_size": 64, "rope_theta": 5e5}
    assert document_differences(SMALL, theirs) == ["hidden_size is 32, in the folder 64"]


def test_a_model_of_fewer_layers_is_the_beginning_of_the_whole() -> None:
    model = with_num_layers(shape(**WINDOWS, **EXPERTS, first_k_dense_replace=2), 3)
    assert model.hf_config is not None
    assert model.hf_config["layer_types"] == WINDOWS["layer_types"][:3]  # type: ignore[index]
    assert (model.num_layers, model.hf_config["num_hidden_layers"], model.num_moe_layers) == (3, 3, 1)


def test_layers_repeat_after_those_that_differ() -> None:
    assert repeating_layers(shape()) == (0, 1)
    assert repeating_layers(shape(**WINDOWS)) == (0, 3)
    assert repeating_layers(shape(**EXPERTS, first_k_dense_replace=2)) == (2, 1)


@pytest.mark.parametrize(("items", "pattern"), [("aaaa", "a"), ("abab", "ab"), ("aabaa", "aab"), ("abc", "abc")])
def test_shortest_pattern_repeats_to_the_whole(items: str, pattern: str) -> None:
    assert shortest_pattern(items) == tuple(pattern)


def weights_problems(tmp_path: Path, **changes: Any) -> list[str]:
    """What is wrong with a folder whose config.json differs so from that of the run."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    model = replace(shape(), init_from=str(tmp_path))
    return list(file_rules(RunConfig(model=model)))


def test_a_folder_of_the_same_model_may_be_trained_on_other_lengths(tmp_path: Path) -> None:
    assert not weights_problems(tmp_path, max_position_embeddings=8192)


def test_a_folder_of_another_model_than_hf_config_is_refused(tmp_path: Path) -> None:
    (problem,) = weights_problems(tmp_path, hidden_size=64)
    assert "holds another model than model.hf_config: hidden_size is 32, in the folder 64" in problem


def test_a_folder_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    (problem,) = weights_problems(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert "its weights are quantized (mxfp4)" in problem


HYBRID = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "linear_conv_kernel_dim": 4,
}


def test_linear_layers_are_planned_without_attention() -> None:
    found = read_decoder({**SMALL, **HYBRID}, "mine", is_complete=True)
    assert found.mask_layers == ("no_attention", "no_attention", "causal")


def test_linear_layers_of_a_family_that_is_not_understood_are_refused() -> None:
    assert "layer_types has linear_attention" in problem(**{**HYBRID, "model_type": "minimax"})


@pytest.mark.parametrize("layers", [("causal",), ("no_attention", "causal", "causal")])
def test_masks_that_are_not_those_of_linear_layers_are_named(layers: tuple[MaskKind, ...]) -> None:
    model = shape(**HYBRID)
    assert model.hf_config is not None
    found = window_problems(model.hf_config, AttentionConfig(mask_layers=layers), seq_len=64)
    assert "set attention.mask_layers=[no_attention,no_attention,causal]" in "".join(found)


def test_striped_layout_is_refused_for_linear_layers() -> None:
    words = ["exp=qwen3_next_80b_256k", "data.tokenizer=bytes", "attention=striped"]
    config = compose(words).config
    with pytest.raises(ConfigError, match="linear layers need runs of consecutive positions"):
        legal_attention(config, Topology(1, 4))
