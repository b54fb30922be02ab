"""Context parallelism for Hugging Face transformers: causal language models whose attention is exchangeable.

    sharder = enable_context_parallel(model, parallel)          once; parallel: engine.attention.ContextParallel
    loss = model(**sharder.shard_inputs(input_ids, labels)).loss   this rank's share of the mean over all labels
    loss.backward()
    parallel.sum_gradients(model.parameters())

The model computes its rows as ever and reaches us through `transformers.AttentionInterface`. What a call needs to know
travels with it as the keyword argument `sequence`, which transformers' models pass on to their attention; so no state
is kept in the model, and a call without it is refused. A call that lost another argument of `shard_inputs` on its way
is refused by forward pre-hooks, and a model that is not enabled by the `attention_mask` (`ShardMask`). Every feature of
transformers that this attention does not have is refused by name: none is ignored. What a model asks for is seen when
it is enabled, in a forward pass of two tokens that records its calls of attention (`engine.attention.model_calls`).
See docs/library.md and docs/models.md.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.context import HeadShape, SequenceContext, attention
from engine.attention.latent_calls import latent_attention
from engine.attention.library import ContextParallel
from engine.attention.linear.hugging_face import find_linear_layers
from engine.attention.linear.sequence import LinearSequence
from engine.attention.model_calls import (
    AttentionCall,
    AttentionProbe,
    call_problems,
    describe_call,
    layer_heads,
    option_problems,
    run_probe,
)
from engine.attention.model_config import layer_windows, model_problems
from engine.attention.model_latents import LatentCapture, find_latents, install_captures, with_latents
from engine.config.errors import ConfigError
from engine.config.settings import MaskKind
from engine.data.sampler import IGNORE_INDEX
from engine.planning.visibility.mask import Mask

IMPLEMENTATION = "burst_context_parallel"
MAX_CACHED_CONTEXTS = 8  # batches with other lengths or documents need other plans


LatentLayers = Mapping[int, tuple[nn.Module, LatentCapture]]


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
    latents        of layers whose keys and values are expanded from latents

    A plain class: wrappers of models copy the dataclasses that they find among the arguments.
    """

    def __init__(
        self,
        context: SequenceContext,
        windows: tuple[int | None, ...],
        position_ids: Tensor,
        latents: Mapping[int, LatentCapture],
    ) -> None:
        self.context = context
        self.windows = windows
        self.position_ids = position_ids
        self.latents = latents

    @property
    def linear(self) -> LinearSequence:
        """The sequences for the model's linear layers."""
        return self.context.linear

    def latent_capture(self, layer: int) -> LatentCapture | None:
        """Return what hands a layer's latents on, where these travel; None: keys and values do."""
        return self.latents[layer] if self.context.moves_latents(layer) else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return out [B, T, H, v_dim] of this rank's rows; arguments as of `attention`."""
        return attention(q, k, v, self.context, layer, sinks)


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
        heads: tuple[HeadShape, ...],
        latents: Mapping[int, LatentCapture],
    ) -> None:
        self.parallel = parallel
        self._latents = latents
        self._mask = mask
        self._windows = windows
        self._heads = heads
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
        rows = document_positions(context.positions, context.seq_len, documents)[None]
        sequence = ModelSequence(context, self._windows, rows, self._latents)
        inputs = {**_decoder_inputs(context.shard(input_ids), rows.expand(batch, -1)), "sequence": sequence}
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
        mask = [Mask(seq_len, window=window) for window in self._windows] if any(self._windows) else self._mask
        return self.parallel.context(seq_len, mask, documents, self._heads)


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

    The model makes a forward pass of two tokens here, on its own device and without gradients, in which its calls of
    attention are recorded and not computed. Layers may have different heads, of which `parallel` is made for some.
    """
    transformers = _import_transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"model: got {type(model).__name__}, expected a transformers.PreTrainedModel; call this before the model "
            "is wrapped (DDP, compile), or use engine.attention.attention in a model of your own"
        )
    linear = find_linear_layers(model)
    problems = [*model_problems(model, linear), *(() if linear is None else linear.problems(parallel.method.layout))]
    windows = layer_windows(model.config)
    if any(windows) and mask != "causal":
        problems.append(f"mask: the model asks for sliding windows {sorted(set(filter(None, windows)))} of its own")
    _register(transformers)
    heads: tuple[HeadShape, ...] = ()
    latents: LatentLayers = {}
    if not problems:
        calls, latents, problems = _recorded_calls(model)
        heads = layer_heads(calls)
        silent_layers = () if linear is None else linear.layers
        problems = problems or [*call_problems(calls, windows, silent_layers), *_head_problems(heads, parallel)]
    if problems:
        raise ConfigError([f"{type(model).__name__}: {problem}" for problem in problems])
    use_attention(model)
    if linear is not None:
        linear.add_checks(IMPLEMENTATION)
    for module, check in ((model, check_loss_arguments), (model.base_model, check_positions)):
        if check not in module._forward_pre_hooks.values():  # else enabling it again would add another one
            module.register_forward_pre_hook(check, with_kwargs=True)
    return InputSharder(parallel, mask, windows, heads, install_captures(latents))


def _register(transformers: Any) -> None:
    transformers.AttentionInterface.register(IMPLEMENTATION, attention_forward)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, refuse_masks)


def _recorded_calls(model: Any) -> tuple[list[AttentionCall], LatentLayers, list[str]]:
    """The model's calls of attention, what their keys and values are expanded from, and why it makes none under
    context parallelism; the model is not changed.
    """
    before, experts = model.config._attn_implementation, model.config._experts_implementation
    device = next(model.parameters()).device
    linear = find_linear_layers(model)
    if linear is not None:
        linear.replace_functions(ShardMask)
    model.set_attn_implementation(IMPLEMENTATION)
    if device.type == "meta" and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on the router

    def run(shape: tuple[int, int], probe: AttentionProbe) -> Any:
        positions = torch.arange(shape[1], device=device).expand(shape)
        return run_probe(model, _decoder_inputs(torch.zeros_like(positions), positions), probe)

    try:
        with torch.no_grad():
            run((1, 2), probe := AttentionProbe())
        latents = find_latents(model, probe.calls, run)
        return with_latents(probe.calls, latents), latents, []
    except Exception as error:  # whatever the model's own code raises
        return [], {}, [f"a forward pass of two tokens failed: {type(error).__name__}: {error}"]
    finally:
        model.set_attn_implementation(before)
        if device.type == "meta" and model._can_set_experts_implementation():
            model.set_experts_implementation(experts)


def _decoder_inputs(input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """What every call of a model gets, beside the sequence and labels: input_ids and positions [B, T] of its rows."""
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(positions, dtype=torch.bool).as_subclass(ShardMask),
        "position_ids": positions,
        "use_cache": False,
    }


def model_heads(model: nn.Module) -> tuple[HeadShape, ...]:
    """Heads of the model's layers in order, of one of them where all have the same: what a ContextParallel is made for.

    The model makes a forward pass of two tokens. Raises ConfigError if that fails under context parallelism.
    """
    _register(_import_transformers())
    calls, _, problems = _recorded_calls(model)
    if problems:
        raise ConfigError([f"{type(model).__name__}: {problem}" for problem in problems])
    return layer_heads(calls)


def use_attention(model: Any) -> None:
    """Make a transformers model call `attention_forward` for its attention, and `refuse_masks` for its masks."""
    _register(_import_transformers())
    model.set_attn_implementation(IMPLEMENTATION)


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
    if not isinstance(sequence, ModelSequence):
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
    sequence: ModelSequence | AttentionProbe | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What `transformers.AttentionInterface` calls.

    Args:
        module: The layer's attention.
        query: [B, H, T, head_dim].
        key: [B, K, T, head_dim].
        value: [B, K, T, v_dim].
        attention_mask: Refused.
        dropout: Refused unless 0.
        scaling: Of the scores; None: 1/sqrt(head_dim).
        sliding_window: That of the layer by the model's config.
        sequence: From `shard_inputs`, or of the forward pass that enabled the model.
        s_aux: Learnable attention sinks [H], as transformers calls them; None: the layer has none.
        options: Refused if they would change a result.

    Returns:
        out [B, T, H, v_dim], and no weights.
    """
    if sequence is None:
        raise ValueError(
            f"{type(module).__name__} runs under context parallelism, but its model was called without the arguments "
            "that InputSharder.shard_inputs returns, or does not hand `sequence` on to its attention. Generation needs "
            'a model without context parallelism: model.set_attn_implementation("sdpa")'
        )
    problems = list(option_problems(module, attention_mask, dropout, options))
    if isinstance(sequence, AttentionProbe):
        operands = query, key, value
        return sequence.record(module, describe_call(module, operands, sliding_window, problems), operands), None
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
    capture = sequence.latent_capture(layer)
    if capture is None:
        return sequence.attend(layer, q, k, v, s_aux), None
    c, k_rope = capture.take(module, len(q)), k[:, :, 0, q.shape[-1] - capture.shape.rope_dim :]
    weight, bias = capture.expansion.weight, capture.expansion.bias
    return latent_attention(q, c, k_rope, weight, sequence.context, layer, bias=bias, sinks=s_aux), None


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


def _head_problems(heads: Sequence[HeadShape], parallel: ContextParallel) -> Iterator[str]:
    """Why the ranks cannot divide the heads of all layers."""
    shapes = list(dict.fromkeys(heads))
    # Latents may be found only here: they need not be given.
    if shapes and replace(parallel.heads, latent=None) not in [replace(shape, latent=None) for shape in shapes]:
        yield (
            f"has {' and '.join(map(str, shapes))}, but ContextParallel was made for {parallel.heads}; give it "
            f"the num_heads, num_kv_heads, head_dim and v_dim of {'the model' if len(shapes) == 1 else 'one of these'}"
        )
        return
    for shape in shapes:
        yield from parallel.head_problems(shape)


def document_positions(positions: Tensor, seq_len: int, documents: Sequence[int]) -> Tensor:
    """Return the position of every row in its document, [T]; those of padding are the last of the sequence."""
    positions = positions.clamp(max=seq_len - 1)
    if len(documents):
        starts = torch.tensor([int(start) for start in documents], device=positions.device)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return positions


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "engine.attention.hugging_face needs the transformers library, version 5 or newer: pip install transformers"
        ) from error
    return transformers
