"""Converts the shape of a model from and to Hugging Face's config.json. Standard library only.

Families: Llama 2 and 3, Mistral, Qwen 2 and 2.5 (biases of q, k and v), Qwen 3 (norms of q and k). A config.json that
requires unsupported features is an error: nothing is left out silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import MaskKind, ModelConfig, RopeScalingConfig
from engine.pretrained.decoder_shape import Pretrained
from engine.pretrained.folder import CONFIG_FILE, ModelFolder, open_model_folder

_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # by family
# Defaults of a config.json. Source: LlamaConfig, MistralConfig, Qwen2Config and Qwen3Config of transformers 5.23;
# a test compares. None: computed from other numbers (`_heads`).
_COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "head_dim": None,
}
_QWEN_DEFAULTS: Mapping[str, Any] = {
    **_COMMON_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_COMMON_DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        **_COMMON_DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
}
# Whole numbers, by our names for them; then those that follow from others where they are null.
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
_ROPE_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
_YARN_ATTENTION = frozenset({"attention_factor", "mscale", "mscale_all_dim"})
_ROPE_NAMES = {"factor": "factor", "original_max_position_embeddings": "original_seq_len"}
# RoPE keys that may be stated, and the only value that is supported (engine.model.rope).
_ROPE_FIXED = {"beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read_pretrained(folder: Path) -> Pretrained:
    """Read config.json in `folder`. Raises ConfigError if it is missing, damaged or describes another kind of model."""
    return pretrained_of(open_model_folder(folder))


def pretrained_of(folder: ModelFolder) -> Pretrained:
    """Return the model of an opened folder. Raises ConfigError if config.json is damaged or of another kind."""
    path, stated = folder.path / CONFIG_FILE, folder.config
    family = str(stated.get("model_type"))
    if family not in CONFIG_DEFAULTS:
        raise ConfigError(
            f"{path}: model_type is {stated.get('model_type')!r}, expected one of {', '.join(CONFIG_DEFAULTS)}"
        )
    document = {**CONFIG_DEFAULTS[family], **stated}
    try:
        problems = [*_problems(document), *_rope_problems(stated, document)]
        model = None if problems else _pretrained(document, folder.path)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from error
    if model is None:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return model


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return the settings in which a configured model differs from that of a folder.

    RoPE may be scaled where the folder's is not, or in another way: that is how contexts grow. Leaving the folder's
    scaling out, or another base (which is what kind=ntk is for), would undo the training of the model.
    """
    names = [item.name for item in fields(ModelConfig) if item.name not in _FREE and item.name != "rope_scaling"]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    if ours.rope_scaling.kind == "none":
        pairs["rope_scaling.kind"] = "none", theirs.rope_scaling.kind
    return [f"model.{name} is {mine}, in the folder {other}" for name, (mine, other) in pairs.items() if mine != other]


def family_of(model: ModelConfig, window_tokens: int | None) -> str:
    """Return the model family whose config.json can express this shape. Raises ConfigError if there is none."""
    if model.qkv_bias and model.qk_norm:
        raise ConfigError("no family of transformers has both model.qkv_bias and model.qk_norm")
    if model.qkv_bias:
        return "qwen2"
    if model.qk_norm:
        return "qwen3"
    return "llama" if window_tokens is None else "mistral"


def config_json(model: ModelConfig, *, seq_len: int, window_tokens: int | None, dtype: str) -> dict[str, Any]:
    """Build config.json for a model trained on `seq_len` tokens. Raises ConfigError if no family fits."""
    family = family_of(model, window_tokens)
    return {
        "architectures": [f"{_ARCHITECTURES[family]}ForCausalLM"],
        "model_type": family,
        **{theirs: getattr(model, ours) for ours, theirs in (_SIZES | _HEADS).items()},
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": _length(model, seq_len),
        "torch_dtype": dtype,
        **_rope_json(model),
        **_window_json(family, model.num_layers, window_tokens),
    }


def config_json_from(
    base: ModelFolder, model: ModelConfig, *, seq_len: int, window_tokens: int | None, dtype: str
) -> dict[str, Any]:
    """Build config.json from that of `base` with the changes of training: RoPE, window, longest sequence, dtype.

    A RoPE scaling that changed is written as versions 4 and 5 of transformers both read it. Raises ConfigError when no
    family fits.
    """
    before, family, document = pretrained_of(base), base.config["model_type"], dict(base.config)
    if window_tokens is not None and family == "llama":  # which has no window
        family = family_of(model, window_tokens)
        document |= {"model_type": family, "architectures": [f"{_ARCHITECTURES[family]}ForCausalLM"]}
    length = max(before.seq_len, seq_len)
    has_new_rope = model.rope_scaling != before.model.rope_scaling
    if has_new_rope or (length != before.seq_len and model.rope_scaling.kind in ("yarn", "llama3")):
        for key in ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"):
            document.pop(key, None)
        document |= _rope_json(model)
        length = _length(model, length)
    if length != before.seq_len:
        document["max_position_embeddings"] = length
    if window_tokens != before.window_tokens:
        document.pop("layer_types", None)
        document |= _window_json(family, model.num_layers, window_tokens, is_new=True)
    names = [name for name in ("dtype", "torch_dtype") if name in document] or ["torch_dtype"]
    return document | dict.fromkeys(names, dtype)


def hub_config_json(stated: Mapping[str, Any], *, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the config.json of a trained model of transformers: `stated`, with its dtype and longest sequence."""
    document = dict(stated)
    if isinstance(length := document.get("max_position_embeddings"), int) and length < seq_len:
        document["max_position_embeddings"] = seq_len
    names = [name for name in ("dtype", "torch_dtype") if name in document] or ["torch_dtype"]
    return document | dict.fromkeys(names, dtype)


def _length(model: ModelConfig, seq_len: int) -> int:
    """Return max_position_embeddings; transformers 4 computes yarn's factor as its ratio to the original length."""
    scaling = model.rope_scaling
    if scaling.kind != "yarn" or scaling.original_seq_len is None:
        return seq_len
    return max(seq_len, round(scaling.original_seq_len * scaling.factor))


def yarn_warning(document: Mapping[str, Any]) -> str | None:
    """Return a warning if transformers 4 and 5 read yarn in this config.json differently; else None."""
    rope = _rope({"rope_theta": 10000.0, **document})
    if rope["rope_type"] != "yarn":
        return None
    length, original = document["max_position_embeddings"], rope["original_max_position_embeddings"]
    if math.isclose(length / original, rope["factor"]):
        return None
    return (
        f"transformers 4 takes yarn's factor as max_position_embeddings / original_max_position_embeddings, here "
        f"{length / original:g}, so it sees another model than version 5, which takes factor={rope['factor']:g}"
    )


def _window_json(family: str, layers: int, window_tokens: int | None, *, is_new: bool = False) -> dict[str, Any]:
    """Return the keys of a window; is_new: also without a window, to replace one."""
    if family == "mistral":
        return {"sliding_window": window_tokens}
    if window_tokens is not None:
        window = {"use_sliding_window": True, "sliding_window": window_tokens, "max_window_layers": 0}
        return {**window, "layer_types": ["sliding_attention"] * layers}
    return {"use_sliding_window": False} if is_new else {}


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence per unsupported feature; document: config.json with defaults."""
    for name, expected in {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False}.items():
        if document.get(name, expected) != expected:
            yield f"{name} is {document[name]!r}, expected {expected!r}: this model has nothing else"
    kinds = _layer_kinds(document)
    if len(kinds) > 1:
        yield "only some of its layers have a window; set attention.mask_layers by hand and leave it out of the file"
    if not kinds <= {"full_attention", "sliding_attention"}:
        yield f"layer_types has {', '.join(sorted(kinds))}; expected full_attention or sliding_attention"
    if document["model_type"] == "mistral" and kinds == {"full_attention"} and _window_tokens(document) is not None:
        yield f"layer_types has full_attention, but sliding_window is {document['sliding_window']}; correct one"
    if "sliding_attention" in kinds and _window_tokens(document) is None:
        yield (
            "layer_types has sliding_attention, but use_sliding_window or sliding_window disables it; "
            "correct one of them"
        )


def _layer_kinds(document: Mapping[str, Any]) -> set[str]:
    """Return the kinds of attention of the layers, by the rules of transformers' config classes."""
    if document.get("layer_types"):
        return set(document["layer_types"])
    if document["model_type"] not in ("qwen2", "qwen3"):
        return {"full_attention" if _window_tokens(document) is None else "sliding_attention"}
    layers, first = int(document["num_hidden_layers"]), document["max_window_layers"]
    has_window = _window_tokens(document) is not None
    return {"sliding_attention" if has_window and index >= first else "full_attention" for index in range(layers)}


def _window_tokens(document: Mapping[str, Any]) -> int | None:
    """Return the window of layers with one, in tokens."""
    family, window = document["model_type"], document.get("sliding_window")
    has_window = family == "mistral" or (family in ("qwen2", "qwen3") and document["use_sliding_window"])
    return int(window) if has_window and window is not None else None


def _pretrained(document: Mapping[str, Any], folder: Path) -> Pretrained:
    sizes: dict[str, Any] = {ours: int(document[theirs]) for ours, theirs in _SIZES.items()}
    left_out = {"num_kv_heads": sizes["num_heads"], "head_dim": sizes["hidden_size"] // sizes["num_heads"]}
    heads: dict[str, Any] = {ours: int(document[theirs] or left_out[ours]) for ours, theirs in _HEADS.items()}
    rope = _rope(document)
    model = ModelConfig(
        name=folder.resolve().name,
        **sizes,
        **heads,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope),
        norm_eps=float(document["rms_norm_eps"]),
        tie_embeddings=bool(document["tie_word_embeddings"]),
        qkv_bias=document["model_type"] == "qwen2",
        qk_norm=document["model_type"] == "qwen3",
    )
    window = _window_tokens(document) if "sliding_attention" in _layer_kinds(document) else None
    masks: tuple[MaskKind, ...] = ("causal",) if window is None else ("window",)
    return Pretrained(model, window, int(document["max_position_embeddings"]), masks)


def _rope_disagreement(stated: Mapping[str, Any]) -> str | None:
    """Return how the RoPE settings of a config.json differ between rope_parameters, rope_scaling and top-level keys."""
    spellings = {name: _spelled(stated, name) for name in ("rope_parameters", "rope_scaling")}
    facts = {name: rope for name, rope in spellings.items() if rope is not None}
    parts = []
    for key in sorted({key for rope in facts.values() for key in rope}):
        values = {f"{name}.{key}": rope[key] for name, rope in facts.items() if rope.get(key) is not None}
        if stated.get(key) is not None:  # such as rope_theta, which older files have at the top
            values[key] = stated[key]
        if len({repr(_number(value)) for value in values.values()}) > 1:
            parts.append(" but ".join(f"{name} is {value}" for name, value in values.items()))
    if len(facts) > 1:
        only = facts["rope_parameters"].keys() ^ facts["rope_scaling"].keys()
        only -= {"rope_theta"} if "rope_theta" in stated else set()
        parts += [f"only one of rope_parameters and rope_scaling has {', '.join(sorted(only))}"] if only else []
    return f"{', '.join(parts)}; make them agree, or remove all but one" if parts else None


def _rope_problems(stated: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """Yield RoPE settings that are contradictory or not supported."""
    if disagreement := _rope_disagreement(stated):
        yield disagreement  # which of them is meant is not known, so none is judged
        return
    rope = _rope(document)
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "yarn", "llama3"):
        yield f"RoPE scaling {kind!r} is not known here; expected linear, yarn or llama3"
    elif unknown := sorted(name for name in rope if not _is_known(name, rope)):
        yield f"settings of RoPE that are not known here: {', '.join(f'{name}={rope[name]}' for name in unknown)}"
    elif kind == "yarn" and not math.isclose(_attention_factor(rope), own := _yarn_factor(float(rope["factor"]))):
        yield f"yarn's attention factor is {_attention_factor(rope)} there; this model has {own} for its factor"
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']}: here RoPE rotates whole heads"


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _spelled(document: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a table of RoPE settings with one key for its type and without nulls; None if there is none."""
    found = document.get(name)
    if not isinstance(found, Mapping):
        return None
    rope = {key: value for key, value in found.items() if value is not None}
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    return rope


def _rope(document: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of RoPE: `rope_parameters` since transformers 5, `rope_scaling` before, whose rest is at the top."""
    rope = _spelled(document, "rope_scaling") or _spelled(document, "rope_parameters") or {"rope_type": "default"}
    rope.setdefault("rope_theta", document["rope_theta"])
    if document.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", document["partial_rotary_factor"])
    if rope["rope_type"] in ("yarn", "llama3"):
        length = document.get("original_max_position_embeddings") or document["max_position_embeddings"]
        rope.setdefault("original_max_position_embeddings", length)
    return rope


def _is_known(name: str, rope: Mapping[str, Any]) -> bool:
    if rope["rope_type"] == "yarn" and (name in _YARN_ATTENTION or (name == "truncate" and rope[name] is True)):
        return True
    return name in _ROPE_KEYS or name in _ROPE_NAMES or rope[name] == _ROPE_FIXED.get(name, rope)


def _yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """Return yarn's factor of queries and keys (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Return that factor as transformers reads it from a file."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_factor(factor, mscale) / _yarn_factor(factor, all_dim)
    return _yarn_factor(factor)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScalingConfig:
    if rope["rope_type"] == "default":
        return RopeScalingConfig()
    settings = {ours: rope[theirs] for theirs, ours in _ROPE_NAMES.items() if rope.get(theirs) is not None}
    return RopeScalingConfig(kind=rope["rope_type"], **settings)


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
