"""Reads the shape of a decoder of any family from its config.json (`model.implementation=hf`). Standard library only.

    sizes         by the common key, else by one of its aliases (`n_embd` of GPT-2)
    experts       how many, how wide, and in which layers
    windows       `layer_types` and `sliding_window` become masks of the layers

Only transformers knows the defaults of a config class, so a document that is not complete (`auto_config`) must state
whatever its class might leave out. What plans and counts do not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.config.errors import ConfigError
from engine.config.model_parts import LinearLayersConfig
from engine.config.schema import JsonObject
from engine.config.settings import AttentionConfig, MaskKind, ModelConfig

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
    "seq_len": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
# Its class may leave a key out of the file: then it has a default that differs from family to family.
_LEFT_OUT = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
_MASKS: Mapping[str, MaskKind] = {"full_attention": "causal", "sliding_attention": "window"}
# Families whose linear layers are understood (`engine.attention.linear`), by their name in layer_types.
_LINEAR: Mapping[str, frozenset[str]] = {
    "linear_attention": frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"}),
    "conv": frozenset({"lfm2", "lfm2_moe", "lfm3"}),
}
_GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_GATED_SHARED_EXPERT = frozenset({"qwen2_moe", "qwen3_next", "qwen3_5_moe_text"})
# Families whose feed-forward is two matrices with an activation between. Source: their MLP in transformers 5.23.
_UNGATED = frozenset(
    {"apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"}
    | {"gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron", "opt", "persimmon", "phi"}
    | {"starcoder2", "xglm"}
)
# Families with a norm over every head of q and k, and no setting that says so.
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})


# Keys of a config.json that may differ from those of the folder with the weights, since no weight changes with them.
_FREE = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "max_position_embeddings", "initializer_range"}
    | {"use_cache", "return_dict", "router_aux_loss_coef"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "quantization_config"}
)
_FREE_PREFIXES = ("_", "rope_", "output_")


class LayerKind(NamedTuple):
    """What one layer is: its kind of attention by transformers' name, and whether experts are its feed-forward."""

    attention: str
    has_experts: bool


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder.

    Attributes:
        model: The section `model` of a configuration.
        window_tokens: Attention window of the layers that have one; None: none has.
        seq_len: Longest sequence that the model was trained on.
        mask_layers: Mask of each layer, as a pattern that repeats; of one mask if all layers have it.
        num_parameters: As transformers counts them; None: not asked.
    """

    model: ModelConfig
    window_tokens: int | None
    seq_len: int
    mask_layers: tuple[MaskKind, ...] = ("causal",)
    num_parameters: int | None = None


def read_decoder(document: Mapping[str, Any], name: str, *, is_complete: bool) -> Pretrained:
    """Return the shape of the decoder that `document`, a config.json, describes.

    Args:
        document: The table of the file.
        name: Of the model in tables.
        is_complete: Whether the defaults of the config class are written out in it.

    Raises:
        ConfigError: A key is missing, or says something that plans and counts do not know; all of them at once.
    """
    problems = [*unknown_parts(document), *_missing_sizes(document), *([] if is_complete else _missing_keys(document))]
    if problems:
        raise ConfigError(problems)
    try:
        model = _model(document, name)
        kinds = layer_kinds(document)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"a key is no whole number where one is expected: {error}") from error
    masks = tuple(_masks_of(document)[kind.attention] for kind in kinds)
    window = document.get("sliding_window") if "window" in masks else None
    seq_len = _find(document, "seq_len")
    if not isinstance(seq_len, int):
        raise ConfigError(f"max_position_embeddings: got {seq_len!r}, expected a whole number")
    return Pretrained(model, window, seq_len, shortest_pattern(masks))


def _masks_of(document: Mapping[str, Any]) -> Mapping[str, MaskKind]:
    """Return the mask of every type of layer that is planned; of linear ones those of families that are understood."""
    family = document.get("model_type")
    linear: dict[str, MaskKind] = {name: "no_attention" for name, families in _LINEAR.items() if family in families}
    return {**_MASKS, **linear}


def layer_kinds(document: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the kind of every layer, by the rules of transformers' config classes."""
    layers = int(_find(document, "num_layers"))
    types = document.get("layer_types") or [_common_type(document)] * layers
    experts = _expert_layers(document, layers)
    return tuple(LayerKind(str(kind), index in experts) for index, kind in enumerate(types[:layers]))


def with_num_layers(model: ModelConfig, num_layers: int) -> ModelConfig:
    """Return a model of the first `num_layers` layers of `model`."""
    if model.hf_config is None:
        return replace(model, num_layers=num_layers)
    document = dict(model.hf_config)
    for key, value in model.hf_config.items():
        if key in _ALIASES["num_layers"]:
            document[key] = num_layers
        elif _is_per_layer(value, model.num_layers):
            document[key] = value[:num_layers]
    kinds = layer_kinds(document)
    moe_layers = sum(kind.has_experts for kind in kinds) if model.num_moe_layers else 0
    linear = replace(model.linear_layers, num_layers=sum(kind.attention in _LINEAR for kind in kinds))
    return replace(
        model,
        num_layers=num_layers,
        hf_config=JsonObject(document),
        num_moe_layers=moe_layers,
        linear_layers=linear if model.linear_layers.num_layers else model.linear_layers,
    )


def repeating_layers(model: ModelConfig) -> tuple[int, int]:
    """Return (prefix, period): layers from `prefix` on repeat with `period`, by all that config.json says of layers.

    The pattern is aligned to layer 0, as masks are.
    """
    if model.hf_config is None:
        return 0, 1
    stated = [value for value in model.hf_config.values() if _is_per_layer(value, model.num_layers)]
    experts = [kind.has_experts for kind in layer_kinds(model.hf_config)] if model.num_moe_layers else []
    layers = [str(values) for values in zip(*stated, experts or [False] * model.num_layers, strict=True)]
    for prefix in range(len(layers)):
        tail = layers[prefix:]
        for period in range(1, max(2, len(tail) // 2 + 1)):
            if tail[period:] == tail[:-period]:
                return prefix, period
    return 0, 1


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def shortest_pattern(items: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest beginning of `items` that gives all of them when it is repeated."""
    for size in range(1, len(items)):
        if all(item == items[index % size] for index, item in enumerate(items)):
            return tuple(items[:size])
    return tuple(items)


def contradictions(model: ModelConfig) -> Iterator[str]:
    """Yield the settings of a model that differ from what its hf_config states; what it leaves out is not compared."""
    document: Mapping[str, Any] = model.hf_config or {}
    stated: dict[str, Any] = {ours: _find(document, ours) for ours in _ALIASES if ours != "seq_len"}
    stated["ffn_hidden_size"] = _adjusted_ffn(document)
    stated["tie_embeddings"] = document.get("tie_word_embeddings")
    if model.num_moe_layers and document.get("moe_intermediate_size") is None:
        stated.pop("ffn_hidden_size")  # there it is the width of an expert
    if not model.num_moe_layers:
        stated.pop("experts_per_token")
        stated.pop("num_experts")
    for ours, value in stated.items():
        if isinstance(value, int) and getattr(model, ours) != value:
            yield f"model.{ours} is {getattr(model, ours)}, in model.hf_config {value}"


def window_problems(document: Mapping[str, Any], attention: AttentionConfig, seq_len: int) -> Iterator[str]:
    """Yield in what the masks of a run are not those of a model whose config.json states windows of its layers.

    A window of the whole sequence hides nothing, so there causal layers are the same. Linear layers have no attention.
    """
    types, window, known = document.get("layer_types"), document.get("sliding_window"), _masks_of(document)
    layers = int(_find(document, "num_layers") or 1)
    given = attention.mask_layers or (attention.mask,)
    if not types or not set(types) <= known.keys():
        masks: list[MaskKind] = ["causal"] * layers
    else:
        masks = [known[kind] for kind in types]
    has_windows = "window" in masks and (window or 0) < seq_len
    if not has_windows and "no_attention" not in {*masks, *given}:
        return
    asked = [given[index % len(given)] for index in range(len(masks))]
    # Windows as long as the sequence hide nothing, so then only linear layers matter.
    pairs = zip(asked, masks, strict=True)
    is_same = all(a == b or (not has_windows and "no_attention" not in (a, b)) for a, b in pairs)
    if not is_same or (has_windows and attention.window_tokens != window):
        yield (
            f"attention.mask_layers, attention.window_tokens: got {list(given)} and {attention.window_tokens}, but the "
            f"layers of model.hf_config are others; set {mask_settings(shortest_pattern(masks), window)}"
        )


def mask_settings(masks: Sequence[MaskKind], window_tokens: int | None) -> str:
    """Return masks of layers as overrides."""
    window = f" attention.window_tokens={window_tokens}" if "window" in masks else ""
    return f"attention.mask_layers=[{','.join(masks)}]{window}"


def document_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys that two config.json state otherwise, apart from those that change no weight."""
    shared = [key for key in ours if key in theirs and key not in _FREE and not key.startswith(_FREE_PREFIXES)]
    return [f"{key} is {ours[key]}, in the folder {theirs[key]}" for key in shared if ours[key] != theirs[key]]


def quantized_text(document: Mapping[str, Any]) -> str:
    """Return why a folder with quantized weights cannot be trained from."""
    method = document["quantization_config"].get("quant_method", "an unknown method")
    return (
        f"quantization_config: its weights are quantized ({method}); save them in 16 bits with transformers "
        "(dequantize=True) and give that folder"
    )


def _find(document: Mapping[str, Any], ours: str) -> Any:
    """Return the value under the first of the aliases that is stated; None: there is none."""
    return next((document[key] for key in _ALIASES[ours] if document.get(key) is not None), None)


def _missing_sizes(document: Mapping[str, Any]) -> Iterator[str]:
    if "text_config" in document:  # where they are
        return
    for ours in ("vocab_size", "hidden_size", "num_layers", "num_heads"):
        if not isinstance(_find(document, ours), int):
            yield f"{_ALIASES[ours][0]}: got {_find(document, ours)!r}, expected a whole number"


def _missing_keys(document: Mapping[str, Any]) -> Iterator[str]:
    left_out = [key for key in _LEFT_OUT if key not in document]
    if "kv_lora_rank" in document:
        left_out = [key for key in left_out if key == "tie_word_embeddings"]
    if document.get("sliding_window") is not None and not document.get("layer_types"):
        left_out.append("layer_types")
    if "moe" in str(document.get("model_type")) and _find(document, "num_experts") is None:
        left_out.append("num_experts")
    if left_out:
        yield (
            f"{', '.join(left_out)}: not stated, and only transformers knows the defaults of "
            f"model_type={document.get('model_type')}; install transformers here, or write them out with "
            "AutoConfig.from_pretrained(FOLDER).to_json_file('FOLDER/config.json', use_diff=False)"
        )


def unknown_parts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the counts and plans of this engine do not know; whether the model's code can be divided over ranks
    is checked when it is built.
    """
    if isinstance(document.get("text_config"), Mapping):
        kind = document["text_config"].get("model_type", "its text model")
        yield (
            f"model_type={document.get('model_type')} holds more than a language model; save {kind} alone with "
            "transformers and give that folder"
        )
        return
    if document.get("quantization_config"):
        yield quantized_text(document)
    for key in ("num_key_value_heads", "head_dim", "sliding_window"):
        if not isinstance(document.get(key), int | None):
            yield f"{key}: got {document[key]!r}, expected one whole number for all layers"
    types, known = [str(kind) for kind in document.get("layer_types") or ()], _masks_of(document)
    if unknown := sorted(set(types) - known.keys()):
        yield (
            f"layer_types has {', '.join(unknown)}; expected {' or '.join(known)}: other layers of "
            f"model_type={document.get('model_type')} are not planned yet"
        )
    elif types and set(types) <= _LINEAR.keys():
        yield "layer_types has linear layers alone; at least one layer of attention is needed"
    if "sliding_attention" in (document.get("layer_types") or ()) and not document.get("sliding_window"):
        yield "layer_types says sliding_attention, but sliding_window is not set; correct one of them"


def _model(document: Mapping[str, Any], name: str) -> ModelConfig:
    family = str(document.get("model_type"))
    sizes: dict[str, Any] = {
        ours: int(_find(document, ours)) for ours in ("vocab_size", "hidden_size", "num_layers", "num_heads")
    }
    kv_heads = _find(document, "num_kv_heads")
    ffn = _adjusted_ffn(document)
    return ModelConfig(
        name=name,
        implementation="hf",
        hf_config=JsonObject(document),
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else int(kv_heads),
        ffn_hidden_size=4 * sizes["hidden_size"] if ffn is None else int(ffn),
        **_heads(document, sizes),
        gated_attention=family in _GATED_ATTENTION,
        linear_layers=_linear_layers(document),
        gated_ffn=family not in _UNGATED,
        qkv_bias=bool(document.get("attention_bias") or family == "qwen2"),
        qk_norm=family in _QK_NORM or bool(document.get("use_qk_norm")),
        tie_embeddings=bool(document.get("tie_word_embeddings")),
        init_std=float(document.get("initializer_range") or 0.02),
        **_experts(document),
    )


def _heads(document: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of heads; of latent attention (MLA) those of the keys and values that attention sees."""
    if (rank := document.get("kv_lora_rank")) is None:
        return {"head_dim": int(document.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"])}
    rope = int(document["qk_rope_head_dim"])
    return {
        "head_dim": int(document["qk_nope_head_dim"]) + rope,
        "v_head_dim": int(document["v_head_dim"]),
        "kv_lora_rank": int(rank),
        "q_lora_rank": document.get("q_lora_rank"),
        "rope_head_dim": rope,
    }


def _experts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a mixture of experts; nothing without one."""
    layers = sum(kind.has_experts for kind in layer_kinds(document))
    if not layers:
        return {}
    width = document.get("moe_intermediate_size") or document.get("expert_ffn_hidden_size")
    width = int(width or _find(document, "ffn_hidden_size"))
    shared = document.get("shared_expert_intermediate_size") or document.get("shared_intermediate_size")
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if shared is None:
        shared = width * next((int(document[key]) for key in counts if document.get(key)), 0)
    return {
        "num_moe_layers": layers,
        "num_experts": int(_find(document, "num_experts")),
        "experts_per_token": int(_find(document, "experts_per_token")),
        "expert_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": int(shared),
        "gated_shared_expert": document.get("model_type") in _GATED_SHARED_EXPERT,
    }


def _linear_layers(document: Mapping[str, Any]) -> LinearLayersConfig:
    """Return the shape of linear layers, by the names of Qwen3-Next and of LFM2."""
    layers = sum(kind.attention in _LINEAR for kind in layer_kinds(document))
    if not layers:
        return LinearLayersConfig()
    if document.get("conv_L_cache") is not None:
        return LinearLayersConfig(num_layers=layers, conv_kernel=int(document["conv_L_cache"]))
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {name: int(document[f"linear_{name}"]) for name in names}
    return LinearLayersConfig(num_layers=layers, conv_kernel=int(document["linear_conv_kernel_dim"]), **sizes)


def _adjusted_ffn(document: Mapping[str, Any]) -> int | None:
    """Return the width of the feed-forward; LFM2 computes it from the one that its config.json states."""
    width: int | None = _find(document, "ffn_hidden_size")
    if width is None or not document.get("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * int(width) / 3)
    if (factor := document.get("block_ffn_dim_multiplier")) is None:
        return width
    multiple = int(document["block_multiple_of"])
    return -(-int(factor * width) // multiple) * multiple


def _expert_layers(document: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Return the indices of the layers whose feed-forward is a mixture of experts."""
    if not _find(document, "num_experts"):
        return frozenset()
    if (types := document.get("mlp_layer_types")) is not None:
        return frozenset(index for index, kind in enumerate(types[:layers]) if kind == "sparse")
    if isinstance(document.get("moe_layers"), Sequence):
        return frozenset(document["moe_layers"])
    starts = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    first = next((document[key] for key in starts if document.get(key) is not None), 0)
    step, dense = document.get("decoder_sparse_step") or 1, set(document.get("mlp_only_layers") or ())
    return frozenset(index for index in range(int(first), layers) if (index + 1) % step == 0 and index not in dense)


def _common_type(document: Mapping[str, Any]) -> str:
    """Return the kind of attention of all layers where no list says it."""
    has_window = document.get("sliding_window") is not None and document.get("use_sliding_window") is not False
    return "sliding_attention" if has_window else "full_attention"
