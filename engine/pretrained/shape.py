"""The shape of a model as Hugging Face's config.json spells it, there and back. Standard library only.

Families: Llama 2 and 3, Mistral, Qwen 2 and 2.5 (biases of q, k and v), Qwen 3 (norms of q and k). What a config.json
asks for and this model does not have is an error: nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import ModelConfig, RopeScalingConfig
from engine.runs.files import require_json_object

CONFIG_FILE = "config.json"
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # by family
# Whole numbers that every config.json has, by our names for them; then those that it may leave out.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_HEADS = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
# Settings that may differ from the folder's: they change no weight, or are meant to (longer sequences).
_FREE = frozenset({"name", "init_std", "init_from", "require_init_from"})
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_NAMES = {"factor": "factor", "original_max_position_embeddings": "original_seq_len"}
# What all models of these families have, where they say it (engine.model.rope).
_ROPE_FIXED = {"beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder: its shape, keys that every token sees (None: all before it), longest trained sequence."""

    model: ModelConfig
    window_tokens: int | None
    seq_len: int | None


def read_pretrained(folder: Path) -> Pretrained:
    """What config.json in `folder` says. Raises ConfigError when it is missing, damaged or asks for something else."""
    path = folder / CONFIG_FILE
    document = require_json_object(path, "the folder of a Hugging Face model", ConfigError)
    try:
        problems = list(_problems(document))
        model = None if problems else _pretrained(document, folder)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from error
    if model is None:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return model


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Settings in which a configured model is not the one of a folder.

    RoPE may be scaled where the folder's is not, or in another way: that is how contexts grow. Leaving the folder's
    scaling out, or another base (which is what kind=ntk is for), would undo what the model has learned.
    """
    names = [item.name for item in fields(ModelConfig) if item.name not in _FREE and item.name != "rope_scaling"]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    if ours.rope_scaling.kind == "none":
        pairs["rope_scaling.kind"] = "none", theirs.rope_scaling.kind
    return [f"model.{name} is {mine}, in the folder {other}" for name, (mine, other) in pairs.items() if mine != other]


def family_of(model: ModelConfig, window_tokens: int | None) -> str:
    """The family whose config.json can say this shape. Raises ConfigError when none can."""
    if model.qkv_bias and model.qk_norm:
        raise ConfigError("no family of transformers has both model.qkv_bias and model.qk_norm")
    if model.qkv_bias:
        return "qwen2"
    if model.qk_norm:
        return "qwen3"
    return "llama" if window_tokens is None else "mistral"


def config_json(model: ModelConfig, *, seq_len: int, window_tokens: int | None, dtype: str) -> dict[str, Any]:
    """config.json for a model that was trained on `seq_len` tokens. Raises ConfigError when no family fits."""
    family = family_of(model, window_tokens)
    document = {
        "architectures": [f"{_ARCHITECTURES[family]}ForCausalLM"],
        "model_type": family,
        **{theirs: getattr(model, ours) for ours, theirs in (_SIZES | _HEADS).items()},
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": seq_len,
        "torch_dtype": dtype,
        **_rope_json(model),
    }
    if family == "mistral":
        document["sliding_window"] = window_tokens
    elif window_tokens is not None:
        window = {"use_sliding_window": True, "sliding_window": window_tokens, "max_window_layers": 0}
        document |= {**window, "layer_types": ["sliding_attention"] * model.num_layers}
    return document


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """What is asked for that this model does not have."""
    family = document.get("model_type")
    if family not in _ARCHITECTURES:
        yield f"model_type is {family!r}, expected one of {', '.join(_ARCHITECTURES)}"
        return
    for name, expected in {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False}.items():
        if document.get(name, expected) != expected:
            yield f"{name} is {document[name]!r}, expected {expected!r}: this model has nothing else"
    rope = _rope(document)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn", "llama3"):
        yield f"RoPE scaling {kind!r} is not known here; expected linear, yarn or llama3"
    elif unknown := sorted(name for name in rope if not _is_known(name, rope)):
        yield f"settings of RoPE that are not known here: {', '.join(f'{name}={rope[name]}' for name in unknown)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']}: here RoPE turns whole heads"
    kinds = set(document.get("layer_types") or ())
    if len(kinds) > 1 or (_uses_window(document) and not kinds and document.get("max_window_layers")):
        yield "only some of its layers have a window; set attention.mask_layers by hand and leave it out of the file"


def _pretrained(document: Mapping[str, Any], folder: Path) -> Pretrained:
    sizes: dict[str, Any] = {ours: int(document[theirs]) for ours, theirs in _SIZES.items()}
    left_out = {"num_kv_heads": sizes["num_heads"], "head_dim": sizes["hidden_size"] // sizes["num_heads"]}
    heads: dict[str, Any] = {ours: int(document.get(theirs) or left_out[ours]) for ours, theirs in _HEADS.items()}
    rope, length = _rope(document), document.get("max_position_embeddings")
    model = ModelConfig(
        name=folder.resolve().name,
        **sizes,
        **heads,
        rope_theta=float(rope.get("rope_theta", document.get("rope_theta", 10000.0))),
        rope_scaling=_rope_scaling(rope),
        norm_eps=float(document.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(document.get("tie_word_embeddings", False)),
        qkv_bias=document["model_type"] == "qwen2",
        qk_norm=document["model_type"] == "qwen3",
    )
    window = int(document["sliding_window"]) if _uses_window(document) else None
    return Pretrained(model, window, None if length is None else int(length))


def _uses_window(document: Mapping[str, Any]) -> bool:
    if document.get("sliding_window") is None:
        return False
    kinds = document.get("layer_types")
    if kinds:
        return set(kinds) == {"sliding_attention"}
    return bool(document["model_type"] == "mistral" or document.get("use_sliding_window", False))


def _rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of RoPE: `rope_parameters` since transformers 5, `rope_scaling` before."""
    found = document.get("rope_parameters") or document.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _is_known(name: str, rope: Mapping[str, Any]) -> bool:
    return name in _ROPE_KEYS or name in _ROPE_NAMES or rope[name] in (None, _ROPE_FIXED.get(name))


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScalingConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScalingConfig()
    settings = {ours: rope[theirs] for theirs, ours in _ROPE_NAMES.items() if rope.get(theirs) is not None}
    return RopeScalingConfig(kind=kind, **settings)


def _rope_json(model: ModelConfig) -> dict[str, Any]:
    scaling, theta = model.rope_scaling, model.rope_theta
    if scaling.kind == "ntk":  # a larger base, and no more
        theta *= scaling.factor ** (model.head_dim / (model.head_dim - 2))
    if scaling.kind in ("none", "ntk"):
        return {"rope_theta": theta, "rope_scaling": None}
    settings: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        fixed = ("beta_fast", "beta_slow") if scaling.kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        settings["original_max_position_embeddings"] = scaling.original_seq_len
        settings |= {name: _ROPE_FIXED[name] for name in fixed}
    return {"rope_theta": theta, "rope_scaling": settings}
