"""What a transformers model's config and modules say of it that its calls of attention hide."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from engine.attention.linear.hugging_face import LinearLayers

_LAYER_TYPES = ("full_attention", "sliding_attention")


def model_problems(model: Any, linear: LinearLayers | None = None) -> Iterator[str]:
    """One sentence per property of the model that would be computed wrongly and that its calls of attention hide.

    `linear`: its linear layers, where these run over all ranks; None: they are refused.
    """
    config = model.config
    if not model._can_set_attn_implementation():
        yield "its attention is not exchangeable (it does not use transformers.AttentionInterface)"
    if config.get_text_config() is not config:
        yield "it is not a language model made of attention layers alone; enable the text model of a larger one"
        return
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if rate := _any_layer(config, name):
            yield f"config.{name} is {rate}; attention over several ranks has no dropout, set 0"
    for name in ("attn_logit_softcapping", "attention_chunk_size", "output_attentions", "output_router_logits"):
        if value := _any_layer(config, name):
            yield f"config.{name} is {value}, which context parallelism does not have"
    yield from _sequence_problems(model, linear)


def _sequence_problems(model: Any, linear: LinearLayers | None) -> Iterator[str]:
    """Parts of the model, besides attention and `linear`, that look at more than one position."""
    config = model.config
    supported = (*_LAYER_TYPES, *(() if linear is None else (linear.family.layer_type,)))
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(supported))
    if others:
        yield f"has layers of type {', '.join(others)}; only {' and '.join(supported)} can be divided"
    known = set() if linear is None else linear.parts
    mixers = (part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.RNNBase)) and part not in known)
    mixing = sorted({type(part).__name__ for part in mixers})
    if mixing:
        yield f"has {', '.join(mixing)} modules, which mix neighbouring tokens of one rank"
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None and "position" in name.rpartition(".")[2]:
            yield f"its position table {name} has a padding_idx: positions would not begin at {part.padding_idx + 1}"
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        yield f"its {type(model.base_model).__name__} takes no position_ids, and a rank's rows are not consecutive"
    varying = sorted({"dynamic", "longrope"} & set(_rope_types(getattr(config, "rope_parameters", None))))
    if varying:
        yield f"its rope_type {varying[0]} depends on the longest position, which differs from rank to rank"
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM") or hasattr(model, "_loss_function"):
        yield "its loss is not transformers' causal language modelling loss, which takes shifted labels"


def _rope_types(parameters: Any) -> Iterator[str]:
    """Kinds of rotary embedding in a config, which may hold one per type of layer."""
    if isinstance(parameters, Mapping):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value) if isinstance(value, Mapping) else ()


def _layer_configs(config: Any) -> list[Any]:
    """The config of every layer: one and the same, unless the model's layers differ in more than their types."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(config.num_hidden_layers)


def _any_layer(config: Any, name: str) -> Any:
    """A setting in the first layer where it is neither absent nor 0; None if there is none."""
    return next((value for layer in _layer_configs(config) if (value := getattr(layer, name, None))), None)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window in tokens of every layer, the token itself included; None: none."""
    layers, types = _layer_configs(config), getattr(config, "layer_types", None)
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if types is None:
        return tuple(windows)
    return tuple(window if kind == "sliding_attention" else None for window, kind in zip(windows, types, strict=False))
