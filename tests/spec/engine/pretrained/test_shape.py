"""config.json and the index of weights: what is read, what is refused and why. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, ModelConfig, RopeScalingConfig, RunConfig, TrainConfig
from engine.data.rules import file_rules
from engine.pretrained.names import INDEX_FILE, check_names, weight_files
from engine.pretrained.shape import CONFIG_DEFAULTS, config_json, differences, family_of, read_pretrained

LLAMA2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


def folder_of(tmp_path: Path, document: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(document))
    return tmp_path


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": None}


def test_keys_that_a_config_leaves_out_have_their_defaults(tmp_path: Path) -> None:
    found = read_pretrained(folder_of(tmp_path, LLAMA2))
    assert found.model.num_kv_heads == 32
    assert found.model.head_dim == 128
    assert found.model.tie_embeddings is False
    assert found.window_tokens is None
    assert found.seq_len == 4096
    assert found.model.rope_theta == 10000.0
    assert found.model.rope_scaling == RopeScalingConfig()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_as_old_or_new_versions_write_it(tmp_path: Path, key: str) -> None:
    found = read_pretrained(folder_of(tmp_path, {**LLAMA2, key: YARN, "rope_theta": 5e5}))
    assert found.model.rope_theta == 5e5
    assert found.model.rope_scaling == RopeScalingConfig(kind="yarn", factor=4.0, original_seq_len=4096)
    assert found.seq_len == 4096


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "RoPE scaling 'dynamic' is not known"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "truncate": False}}, "not known here: truncate"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "only some of its layers"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28},
            "only some of its layers",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "only some of its layers"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32},
            "use_sliding_window or sliding_window disables it",
        ),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "but sliding_window is 4096"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            "rope_parameters.rope_type is default but rope_scaling.rope_type is yarn",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5},
            r"rope_theta is 10000\.0 but rope_theta is 500000",
        ),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 8}, "original_max_position_embeddings": 9},
            "but original_max_position_embeddings is 9",
        ),
        ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, r"yarn's attention factor is 1\.0 there"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, r"yarn's attention factor is 1\.0 there"),
        ({"hidden_size": "many"}, "cannot be read"),
        ({"num_hidden_layers": None}, "cannot be read"),
        ({"num_attention_heads": 0, "head_dim": None}, "cannot be read"),
        ({"vocab_size": float("inf")}, "cannot be read"),
        ({"layer_types": [{}]}, "cannot be read"),
    ],
)
def test_what_this_model_does_not_have_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_pretrained(folder_of(tmp_path, {**LLAMA2, **change}))


def test_a_folder_without_a_config_or_with_a_damaged_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a Hugging Face model"):
        read_pretrained(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_pretrained(folder_of(tmp_path, [1]))


@pytest.mark.parametrize(
    ("document", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 32,
            },
            9,
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 32}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "llama", "sliding_window": 9}, None),
    ],
)
def test_windows_are_those_of_transformers(tmp_path: Path, document: dict[str, Any], window: int | None) -> None:
    assert read_pretrained(folder_of(tmp_path, {**LLAMA2, **document})).window_tokens == window


SHAPES = {
    "llama": (ModelConfig(), None),
    "mistral": (ModelConfig(num_kv_heads=2), 512),
    "qwen2": (ModelConfig(qkv_bias=True, tie_embeddings=True), None),
    "qwen3": (ModelConfig(qk_norm=True, head_dim=128), None),
}
ROPES = [
    RopeScalingConfig(),
    RopeScalingConfig(kind="linear", factor=2.0),
    RopeScalingConfig(kind="yarn", factor=8.0, original_seq_len=4096),
    RopeScalingConfig(kind="llama3", factor=8.0, original_seq_len=8192),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
@pytest.mark.parametrize("family", SHAPES)
def test_what_is_written_is_read_back(tmp_path: Path, family: str, rope: RopeScalingConfig) -> None:
    model, window = SHAPES[family]
    model = replace(model, rope_scaling=rope, name=tmp_path.name)
    document = config_json(model, seq_len=9000, window_tokens=window, dtype="bfloat16")
    found = read_pretrained(folder_of(tmp_path, document))
    assert document["model_type"] == family
    assert found.model == model
    assert found.window_tokens == window
    # transformers 4 computes the factor of yarn as its ratio to the original length
    assert found.seq_len == (32768 if rope.kind == "yarn" else 9000)


def test_ntk_is_exported_as_a_larger_rope_base(tmp_path: Path) -> None:
    model = ModelConfig(rope_scaling=RopeScalingConfig(kind="ntk", factor=4.0))
    found = read_pretrained(folder_of(tmp_path, config_json(model, seq_len=1, window_tokens=None, dtype="x"))).model
    assert found.rope_scaling == RopeScalingConfig()
    assert found.rope_theta == pytest.approx(10000.0 * 4.0 ** (64 / 62))


def test_a_shape_without_a_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="no family of transformers has both"):
        family_of(ModelConfig(qkv_bias=True, qk_norm=True), None)


@pytest.mark.parametrize(
    ("attention", "seq_len", "problem"),
    [
        (AttentionConfig(), 512, None),
        (AttentionConfig(), 513, "its tokens look at 512 tokens, but attention.mask=causal lets them look at all 513"),
        (AttentionConfig(mask_layers=("window", "causal"), window_tokens=512), 513, "attention.mask=causal"),
        (AttentionConfig(mask="window", window_tokens=512), 4096, None),
    ],
)
def test_a_mask_beyond_the_models_window_is_refused(
    tmp_path: Path, attention: AttentionConfig, seq_len: int, problem: str | None
) -> None:
    model, window = SHAPES["mistral"]
    folder = folder_of(tmp_path, config_json(model, seq_len=9000, window_tokens=window, dtype="bfloat16"))
    model = replace(model, init_from=str(folder))
    found = list(file_rules(RunConfig(model=model, attention=attention, train=TrainConfig(seq_len=seq_len))))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_rope_scaling_may_differ_from_the_folder() -> None:
    ours = ModelConfig(init_std=1.0, rope_scaling=ROPES[1], name="x", init_from="y")
    assert differences(ours, ModelConfig()) == []
    assert differences(ours, ModelConfig(rope_scaling=ROPES[2])) == []


def test_differences_from_the_folder_are_named() -> None:
    ours = ModelConfig(init_std=1.0, rope_scaling=ROPES[1], name="x", init_from="y")
    assert differences(replace(ours, num_layers=5), ModelConfig()) == ["model.num_layers is 5, in the folder 4"]
    assert differences(ModelConfig(), ours) == ["model.rope_scaling.kind is none, in the folder linear"]
    assert differences(ModelConfig(), ModelConfig(rope_theta=5e5)) == [
        "model.rope_theta is 10000.0, in the folder 500000.0"
    ]


def test_weights_that_are_missing_or_that_nothing_would_read_are_named(tmp_path: Path) -> None:
    check_names(["a", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"], ["a"], tmp_path)
    with pytest.raises(ConfigError, match="lacks b and 0 more"):
        check_names(["a"], ["a", "b"], tmp_path)
    with pytest.raises(ConfigError, match=r"holds a\.bias and 1 more weights that this model does not have"):
        check_names(["a", "b.bias", "a.bias"], ["a"], tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pickled weights are not read"):
        weight_files(tmp_path)


def test_files_of_an_index_are_inside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_text("")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../../one.safetensors"}}))
    assert weight_files(tmp_path) == {"a": tmp_path / "one.safetensors"}


def test_missing_files_of_an_index_are_named(tmp_path: Path) -> None:
    for name in ("two.safetensors", "2" * 400):  # which no disk can hold
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match=f"lacks {name} and 0 more"):
            weight_files(tmp_path)


def test_a_damaged_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        weight_files(tmp_path)


def test_defaults_are_those_of_the_config_classes_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for family, defaults in CONFIG_DEFAULTS.items():
        config = transformers.AutoConfig.for_model(family)
        fields = type(config).__dataclass_fields__
        for name, value in defaults.items():
            theirs = config.default_theta if name == "rope_theta" else getattr(fields.get(name), "default", None)
            assert theirs == value, f"{family}: {name} is {theirs} in transformers"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_config_with_its_family_alone_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(family)
    found = read_pretrained(folder_of(tmp_path, {"model_type": family}))
    assert found.model.num_kv_heads == theirs.num_key_value_heads
    assert found.model.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert found.window_tokens == getattr(theirs, "sliding_window", None)
    assert found.seq_len == theirs.max_position_embeddings


@pytest.mark.parametrize("factor", [{"attention_factor": 0.1 * math.log(4) + 1}, {"mscale": 0.7}, {"truncate": True}])
def test_settings_of_yarn_that_say_the_same_are_taken(tmp_path: Path, factor: dict[str, Any]) -> None:
    found = read_pretrained(folder_of(tmp_path, {**LLAMA2, "rope_scaling": YARN | factor}))
    assert found.model.rope_scaling.kind == "yarn"


def test_two_spellings_of_rope_that_agree_are_one(tmp_path: Path) -> None:
    both = {"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 500000}
    assert read_pretrained(folder_of(tmp_path, {**LLAMA2, **both})).model.rope_theta == 5e5


def test_spellings_of_rope_that_differ_are_one_problem(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ConfigError, match="only one of rope_parameters and rope_scaling has factor") as raised:
        read_pretrained(folder_of(tmp_path, {**LLAMA2, "rope_parameters": plain, "rope_scaling": YARN}))
    assert len(raised.value.problems) == 1, "one fault is listed once"
