"""Context parallelism for Hugging Face transformers: causal language models whose attention is exchangeable.

    sharder = enable_context_parallel(model, parallel)          once; parallel: engine.attention.ContextParallel
    loss = model(**sharder.shard_inputs(input_ids, labels)).loss   this rank's share of the mean over all labels
    loss.backward()
    parallel.sum_gradients(model.parameters())

The model computes its rows as ever and reaches us through `transformers.AttentionInterface`. What a call needs to know
travels with it as the keyword argument `sequence`, which transformers' models pass on to their attention; so no state
is kept in the model, and a call without it is refused. A call that lost another argument of `shard_inputs` on its way
is refused by forward pre-hooks, and a model that is not enabled by the `attention_mask` (`ShardMask`). Every feature of
transformers that this attention does not have is refused by name: none is ignored. See docs/library.md.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.context import SequenceContext, attention
from engine.attention.library import ContextParallel
from engine.attention.linear.hugging_face import find_linear_layers
from engine.config.errors import ConfigError
from engine.config.settings import MaskKind
from engine.data.sampler import IGNORE_INDEX
from engine.planning.visibility.mask import Mask

IMPLEMENTATION = "burst_context_parallel"
MAX_CACHED_CONTEXTS = 8  # batches with other lengths or documents need other plans

# Keyword arguments that transformers hands to every attention and that do not change what is computed.
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "shift_labels", "num_items_in_batch"}
    | {"output_hidden_states", "return_dict", "logits_to_keep"}
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


# What may be done to a `ShardMask` on its way to attention: move it, copy it, look at its shape.
_CARRIES = frozenset(
    {"__get__", "__set__", "__len__", "__repr__", "__deepcopy__", "__reduce_ex__", "size", "dim", "is_floating_point"}
    | {"to", "cpu", "cuda", "pin_memory", "detach", "clone", "contiguous", "expand", "view"}
    | {"stride", "storage_offset", "untyped_storage", "is_conj", "is_neg", "_is_view"}  # torch.compile looks at these
)


class ModelSequence:
    """What one call of a model passes to its attention.

    context        plans of attention over the whole sequences
    windows        sliding window of every layer in tokens by the model's config; None: none
    position_ids   [1, T] of this rank's rows in their documents

    A plain class: wrappers of models copy the dataclasses that they find among the arguments.
    """

    def __init__(self, context: SequenceContext, windows: tuple[int | None, ...], position_ids: Tensor) -> None:
        self.context = context
        self.windows = windows
        self.position_ids = position_ids


class ShardMask(Tensor):
    """The `attention_mask` [B, T] of `shard_inputs`: all ones, and readable by context-parallel attention alone.

    Every stock attention of transformers reads its mask, and would compute a wrong loss from a shard without an error:
    a model that was never enabled, was reloaded, or was switched back.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _CARRIES:
            raise ValueError(
                "inputs of InputSharder.shard_inputs are one rank's rows, but went into a model without context "
                "parallelism: call enable_context_parallel on it, or give it whole sequences"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class InputSharder:
    """Makes this rank's arguments for a model from whole sequences; made by `enable_context_parallel`."""

    def __init__(
        self,
        parallel: ContextParallel,
        mask: Mask | MaskKind | Sequence[Mask | MaskKind],
        windows: tuple[int | None, ...],
    ) -> None:
        self.parallel = parallel
        self._mask = mask
        self._windows = windows
        self._context = functools.lru_cache(maxsize=MAX_CACHED_CONTEXTS)(self._build_context)

    def context(self, seq_len: int, documents: Sequence[int] = ()) -> SequenceContext:
        """The rows of this rank: `.shard` for further inputs, `.gather` for logits."""
        return self._context(seq_len, tuple(int(start) for start in documents))

    def shard_inputs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        documents: Sequence[int] = (),
        num_items_in_batch: int | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of the model for this rank's rows of whole sequences `input_ids` [B, N].

        labels               [B, N], not shifted, -100 where none: usually `input_ids`. They are shifted here, before
                             they are divided, so no label is lost where a rank's rows end
        documents            start positions of packed documents, the first 0, the same for every sequence of the
                             batch: no attention and no label across them, and positions begin anew in each
        num_items_in_batch   labels over which the loss is a mean; None: those of this batch. Give the sum over all
                             data-parallel groups and micro-batches when there are several

        With labels the model's `.loss` is the sum over this rank's labels divided by num_items_in_batch: the ranks'
        losses, and their gradients, add up to those of the whole. All ranks of the group give equal tensors. Sequences
        may be padded on the right, with labels -100. Sends nothing.
        """
        if input_ids.dim() != 2 or (labels is not None and labels.shape != input_ids.shape):
            given = "" if labels is None else f", labels {tuple(labels.shape)}"
            raise ValueError(f"shard_inputs: got input_ids {tuple(input_ids.shape)}{given}; expected [batch, seq_len]")
        batch, seq_len = input_ids.shape
        context = self.context(seq_len, documents)
        rows = _document_positions(context, documents)
        positions = rows.expand(batch, -1)
        inputs: dict[str, Any] = {
            "input_ids": context.shard(input_ids),
            "attention_mask": torch.ones_like(positions, dtype=torch.bool).as_subclass(ShardMask),
            "position_ids": positions,
            "use_cache": False,
            "sequence": ModelSequence(context, self._windows, rows),
        }
        if labels is not None:
            shifted = shift_labels(labels, documents)
            count = int((shifted != IGNORE_INDEX).sum()) if num_items_in_batch is None else num_items_in_batch
            if count < 1:
                raise ValueError("shard_inputs: no token of this batch has a label, so there is no loss")
            local = context.shard(shifted, pad_value=IGNORE_INDEX)
            # transformers' loss takes `shift_labels` as they are; without `labels` it computes no loss at all.
            inputs |= {"labels": local, "shift_labels": local, "num_items_in_batch": count}
        return inputs

    def _build_context(self, seq_len: int, documents: tuple[int, ...]) -> SequenceContext:
        if not any(self._windows):
            return self.parallel.context(seq_len, self._mask, documents)
        masks = [Mask(seq_len, window=window) for window in self._windows]
        return self.parallel.context(seq_len, masks, documents)


def enable_context_parallel(
    model: nn.Module,
    parallel: ContextParallel,
    mask: Mask | MaskKind | Sequence[Mask | MaskKind] = "causal",
) -> InputSharder:
    """Makes attention of a transformers model run over all ranks of `parallel`; returns what makes its inputs.

    mask   what to use instead of plain causal attention, see `ContextParallel.context`. Sliding windows that the
           model's own config asks for are honoured without it

    From then on the model must be called with the arguments of `shard_inputs`, by all ranks of the group, equally
    often and in the same order. Sends nothing itself. Raises ConfigError with everything about the model that context
    parallelism would get wrong; the model is then unchanged.
    """
    transformers = _import_transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"model: got {type(model).__name__}, expected a transformers.PreTrainedModel; call this before the model "
            "is wrapped (DDP, compile), or use engine.attention.attention in a model of your own"
        )
    problems = [f"{type(model).__name__}: {problem}" for problem in _model_problems(model, parallel)]
    linear = find_linear_layers(model)
    if linear is not None:
        problems += [f"{type(model).__name__}: {problem}" for problem in linear.problems(parallel.method.layout)]
    windows = _layer_windows(model.config)
    if any(windows) and mask != "causal":
        problems.append(f"mask: the model asks for sliding windows {sorted(set(filter(None, windows)))} of its own")
    if problems:
        raise ConfigError(problems)
    transformers.AttentionInterface.register(IMPLEMENTATION, attention_forward)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, refuse_masks)
    model.set_attn_implementation(IMPLEMENTATION)
    if linear is not None:
        linear.replace_functions(ShardMask)
        linear.add_checks(IMPLEMENTATION)
    for module, check in ((model, check_loss_arguments), (model.base_model, check_positions)):
        if check not in module._forward_pre_hooks.values():  # else enabling it again would add another one
            module.register_forward_pre_hook(check, with_kwargs=True)
    return InputSharder(parallel, mask, windows)


def shift_labels(labels: Tensor, documents: Sequence[int] = ()) -> Tensor:
    """Labels [B, N] such that each token's is the one after it; -100 at the end of the sequence and of documents."""
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    for start in documents:
        if start > 0:
            shifted[:, start - 1] = IGNORE_INDEX
    return shifted


def check_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a decoder: with a `sequence`, ValueError unless it gets the position ids of its rows."""
    sequence = kwargs.get("sequence")
    if sequence is None:
        return
    rows, given = sequence.position_ids, _arguments(module, args, kwargs).get("position_ids")
    if given is None or given.shape[-1:] != rows.shape[-1:] or not torch.equal(given, rows.expand_as(given)):
        raise ValueError(
            f"{type(module).__name__}: got {'no' if given is None else 'other'} position_ids, expected those of "
            "InputSharder.shard_inputs: the rows of a rank are not consecutive. What wraps the model must pass them on"
        )


def check_loss_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model: with a `sequence` and labels, ValueError unless the loss is this rank's share."""
    if kwargs.get("sequence") is None or _arguments(module, args, kwargs).get("labels") is None:
        return
    missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"{type(module).__name__}: got labels without {' and '.join(missing)} of InputSharder.shard_inputs, so its "
            "loss would not be this rank's share of the mean over all labels. What wraps the model must pass them on"
        )


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence: ModelSequence | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What `transformers.AttentionInterface` calls: (out [B, T, H, D], no weights) of query [B, H, T, D] and key, value
    [B, K, T, D].
    """
    if sequence is None:
        raise ValueError(
            f"{type(module).__name__} runs under context parallelism, but its model was called without the arguments "
            "that InputSharder.shard_inputs returns, or does not hand `sequence` on to its attention. Generation needs "
            'a model without context parallelism: model.set_attn_implementation("sdpa")'
        )
    problems = list(_option_problems(module, attention_mask, dropout, options))
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = sequence.windows[layer]
    if sliding_window != window:
        problems.append(f"asks for sliding_window={sliding_window}, but by the model's config it is {window}")
    if problems:
        raise ValueError(f"{type(module).__name__}, layer {layer}: " + "; ".join(problems))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if scaling is not None:
        factor = scaling * math.sqrt(query.shape[-1])  # kernels scale by 1/sqrt(D)
        q = q if math.isclose(factor, 1.0, rel_tol=1e-9) else q * factor
    return attention(q, k, v, sequence.context, layer), None


def refuse_masks(
    attention_mask: Tensor | None = None, use_vmap: bool = False, config: Any = None, **options: Any
) -> None:
    """What `transformers.AttentionMaskInterface` calls: no mask is ever made; raises where one would be needed.

    Without it transformers drops padding masks silently. It sees local rows only, so a packed sequence is not told
    from a divided one; documents are given to `shard_inputs`.
    """
    problems = []
    if not (attention_mask is None or isinstance(attention_mask, ShardMask) or bool(attention_mask.all())):
        problems.append("attention_mask hides tokens; pad on the right with labels -100 and give no attention_mask")
    if use_vmap:
        problems.append("the model changes its causal mask by a function of its own")
    rule = getattr(options.get("mask_function"), "__name__", "")
    if rule == "bidirectional_mask_function":
        problems.append("the model's attention is not causal")
    size, window = options.get("local_size"), getattr(config, "sliding_window", None)
    if size is not None and size != window:
        problems.append(f"the model asks for local attention of {size} tokens, its config for sliding_window={window}")
    if problems:
        raise ValueError("context parallelism: " + "; ".join(problems))


def _option_problems(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, options: Mapping[str, Any]
) -> Iterator[str]:
    """One sentence per argument of an attention call that context parallelism does not have."""
    if attention_mask is not None:
        yield "was given an attention_mask; masks go to enable_context_parallel(mask=), documents to shard_inputs"
    if dropout:
        yield f"asks for dropout {dropout}; set the config's attention_dropout to 0"
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        yield "is not causal"
    for name, value in options.items():
        if name not in _HARMLESS and name != "is_causal" and value is not None and value is not False:
            yield f"asks for {name}, which attention over several ranks does not have"


def _model_problems(model: Any, parallel: ContextParallel) -> Iterator[str]:
    """One sentence per property of the model that would be computed wrongly."""
    config, heads = model.config, parallel.heads
    if not model._can_set_attn_implementation():
        yield "its attention is not exchangeable (it does not use transformers.AttentionInterface)"
    if config.get_text_config() is not config or not hasattr(config, "num_attention_heads"):
        yield "it is not a language model made of attention layers alone; enable the text model of a larger one"
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found = (config.num_attention_heads, kv_heads, head_dim)
    if found != (heads.num_heads, heads.num_kv_heads, heads.head_dim) or heads.v_dim != heads.head_dim:
        yield f"has (num_heads, num_kv_heads, head_dim) = {found}, but ContextParallel was made for {heads}"
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, 0):
            yield f"config.{name} is {getattr(config, name)}; attention over several ranks has no dropout, set 0"
    for name in ("attn_logit_softcapping", "attention_chunk_size", "output_attentions", "output_router_logits"):
        if getattr(config, name, None):
            yield f"config.{name} is {getattr(config, name)}, which context parallelism does not have"
    yield from _sequence_problems(model)


def _sequence_problems(model: Any) -> Iterator[str]:
    """Parts of the model, besides attention, that look at more than one position."""
    config = model.config
    linear = find_linear_layers(model)
    supported = (*_LAYER_TYPES, *(() if linear is None else (linear.family.layer_type,)))
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(supported))
    if others:
        yield f"has layers of type {', '.join(others)}; only {' and '.join(supported)} can be divided"
    understood = set() if linear is None else linear.parts
    mixers = (part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.RNNBase)) and part not in understood)
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


def _layer_windows(config: Any) -> tuple[int | None, ...]:
    """Sliding window in tokens of every layer, the token itself included; None: none."""
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _document_positions(context: SequenceContext, documents: Sequence[int]) -> Tensor:
    """Position [1, T] of every row in its document; those of padding are the last of the sequence."""
    positions = context.positions.clamp(max=context.seq_len - 1)
    if documents:
        starts = torch.tensor([int(start) for start in documents], device=positions.device)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return positions[None]


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "engine.attention.hugging_face needs the transformers library, version 5 or newer: pip install transformers"
        ) from error
    return transformers
