"""What a transformers model asks of its attention: every call that it makes, recorded in a forward pass of two tokens.

So a model is judged by what it does, before any sequence is divided: heads may differ by layer, and a config may say
what the code does not do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.context import HeadShape

# Keyword arguments that transformers hands to every attention and that do not change what is computed.
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "shift_labels", "num_items_in_batch"}
    | {"output_hidden_states", "return_dict", "logits_to_keep"}
)


class AttentionCall(NamedTuple):
    """One call that a model made of its attention.

    window     sliding window in tokens, the token itself included; None: none
    problems   what of the call context parallelism does not have, a sentence each
    """

    layer: int
    heads: HeadShape
    window: int | None
    problems: tuple[str, ...]


class AttentionProbe:
    """The `sequence` of a call of a model whose attention is to be recorded and not computed, nor are linear layers."""

    linear = None

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def record(self, module: nn.Module, call: AttentionCall, operands: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Zeros [B, T, H, v_dim] in place of the attention of query [B, H, T, head_dim], key and value."""
        query, _, _ = operands
        self.calls.append(call)
        batch, num_heads, rows, _ = query.shape
        return query.new_zeros(batch, rows, num_heads, call.heads.v_dim)


def run_probe(model: nn.Module, inputs: Mapping[str, Any], probe: AttentionProbe) -> Any:
    """The output of one forward pass that is recorded; leaves torch's random numbers as they were.

    Args:
        model: Under our attention implementation.
        inputs: Its keyword arguments but `sequence`.
        probe: Records its calls of attention.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return model(**inputs, sequence=probe)


def describe_call(
    module: nn.Module, operands: tuple[Tensor, Tensor, Tensor], window: int | None, problems: list[str]
) -> AttentionCall:
    """The call of query [B, H, T, head_dim], key and value [B, K, T, head_dim or v_dim] by a model's attention."""
    query, key, value = operands
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        problems = [*problems, "does not say which layer it is (layer_idx)"]
    heads = HeadShape(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    return AttentionCall(-1 if layer is None else int(layer), heads, window, tuple(problems))


def layer_heads(calls: list[AttentionCall]) -> tuple[HeadShape, ...]:
    """Heads of the layers in order; of one of them where all have the same."""
    by_layer = {call.layer: call.heads for call in calls}
    heads = tuple(by_layer[layer] for layer in sorted(by_layer))
    return heads if len(set(heads)) > 1 else heads[:1]


def option_problems(
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


def call_problems(
    calls: list[AttentionCall], windows: tuple[int | None, ...], silent_layers: Collection[int] = ()
) -> Iterator[str]:
    """One sentence per kind of call that cannot be divided; layers with the same problem share a sentence.

    Args:
        calls: Of one forward pass.
        windows: Of the layers by the model's config.
        silent_layers: Indexes of layers that have something else in the place of attention.
    """
    found: dict[str, list[int]] = {}
    first: dict[int, HeadShape] = {}
    for call in calls:
        problems = [*call.problems]
        expected = windows[call.layer] if 0 <= call.layer < len(windows) else None
        if call.window != expected:
            problems.append(f"asks for sliding_window={call.window}, but by the model's config it is {expected}")
        if first.setdefault(call.layer, call.heads) != call.heads:
            problems.append(f"attends with {first[call.layer]} and with {call.heads}")
        for problem in problems:
            found.setdefault(problem, []).append(call.layer)
    for problem, layers in found.items():
        yield f"attention of layer {', '.join(map(str, sorted(set(layers))))} {problem}"
    silent = sorted(set(range(len(windows))) - first.keys() - set(silent_layers))
    if silent:
        yield f"layer {', '.join(map(str, silent))} makes no call of transformers' AttentionInterface"
