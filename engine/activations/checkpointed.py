"""Layers that keep for backward what their policy says and compute the rest again, all rows at once or tile by tile.

A transformer layer is row by row but for attention, so its backward pass is a chain of four parts, each of which asks
for little:

    x -> project -> q, k, v        again, if they were not kept
    q, k, v -> attention           again for those rows only whose (out, lse) were not kept (memory policies)
    x, out -> finish               again with a graph, without its last product; dy -> dx, dout
    dout -> attention backward     dq, dk, dv
    x -> project                   for its gradients only, no product at all; dq, dk, dv -> dx

With tiles the parts but attention run on a few rows at a time, so that no tensor of rows x ffn exists. What is kept
goes through a store, to device or host memory; when the attention plan itself keeps its chunks in host memory, the
layer's inputs and results lie there as well. No tile needs a message, so ranks may have different numbers of tiles.

All state lives in the autograd context: evaluation, several micro-batches in flight and exceptions leave none behind.
Sources: Chen et al. 2016; Gu et al. 2024 and Sun et al. 2025 (engine.planning.checkpoint_policy); Yao et al. 2024
(FPDT) and Bekman et al. 2025 (ALST: tiled MLP).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from engine.activations.layer_call import LayerCall, LayerExecution
from engine.activations.saved import offloaded
from engine.activations.store import ActivationStore, DeviceStore, HostStore, SavedTensors
from engine.attention.runtime import ForwardPass, PlannedAttention
from engine.model.dropout import Dropout
from engine.model.llama import AttentionFn, LlamaModel, TransformerBlock


def apply_policies(model: LlamaModel, executions: Sequence[LayerExecution]) -> None:
    """Makes every layer run in its execution, in place.

    Layers must then be given attention with a `runtime` (`engine.attention.runtime.PlannedAttention`), but for those
    that keep everything and are not tiled.
    """
    model.activation_store = executions[0].store
    for layer, execution in zip(model.layers, executions, strict=True):
        assert isinstance(layer, TransformerBlock)
        run = run_of(layer, execution)
        if run is not None:
            # On the instance, inside FSDP's hooks: weights are gathered before forward and before backward.
            layer.forward = run  # type: ignore[method-assign]
    for layer, before, execution in zip(model.layers[1:], executions, executions[1:], strict=False):
        if isinstance(before.store, HostStore) and execution.store is not before.store:
            layer.register_forward_hook(functools.partial(_wait_pending, before.store))


def _wait_pending(store: HostStore[Any], *_: Any) -> None:
    """After the first layer that keeps on the device: copies of those before had its time, and need no memory more."""
    store.wait_pending()


def run_of(layer: TransformerBlock, execution: LayerExecution) -> Callable[..., Tensor] | None:
    """What replaces the layer's forward; None: nothing does."""
    if execution.policy.kind != "none" or execution.tile_tokens is not None:
        return torch.compiler.disable(functools.partial(_run_layer, layer, execution))  # type: ignore[no-untyped-call, no-any-return]
    if isinstance(execution.store, HostStore):
        return functools.partial(_run_offloaded, layer, layer.forward, execution.store)
    return None


def _run_offloaded(
    layer: TransformerBlock,
    forward: Callable[..., Tensor],
    store: ActivationStore,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: AttentionFn,
    dropout: Dropout | None = None,
) -> Tensor:
    """TransformerBlock.forward, of which autograd keeps everything, in the store."""
    shared = [*layer.parameters(), cos, sin, *([] if dropout is None else [dropout.keys])]  # which every layer uses
    with offloaded(store, leave=shared) if torch.is_grad_enabled() else contextlib.nullcontext():
        return forward(hidden, cos, sin, attention, dropout)


def _run_layer(
    layer: TransformerBlock,
    execution: LayerExecution,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: Any,
    dropout: Dropout | None = None,
) -> Tensor:
    """TransformerBlock.forward in a execution."""
    function = attention if isinstance(attention, PlannedAttention) else PlannedAttention(attention.runtime)
    call = LayerCall(layer, execution, cos, sin, function.runtime, hidden.device, dropout)
    group = _group_of(call, function.forward_pass) if torch.is_grad_enabled() else None
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    out: Tensor = _LayerFunction.apply(call, group, hidden, *parameters)  # type: ignore[no-untyped-call]
    return out


class _Link:
    """What one call of a layer left behind: the call, and what was kept of it."""

    def __init__(self, call: LayerCall, tensors: dict[str, Tensor]) -> None:
        # What plans leave in host memory lies where it belongs.
        store = DeviceStore() if call.runtime.on_host else call.execution.store
        self.call, self._names = call, tuple(tensors)
        self.kept: SavedTensors = store.save(list(tensors.values()))

    def fetch(self) -> dict[str, Tensor]:
        """What was kept, by name."""
        return dict(zip(self._names, self.kept.fetch(), strict=True))


class _Group:
    """Layers of one forward pass that share the input of the first of them; the other inputs follow by linear work."""

    def __init__(self) -> None:
        self.links: list[_Link] = []
        self._inputs: dict[int, Tensor] = {}

    def input_of(self, place: int, kept: dict[str, Tensor]) -> Tensor:
        """Input of the layer at `place`, of which so much was kept; the first that asks makes all before it, too."""
        if "hidden" in kept:
            return kept["hidden"]
        if place not in self._inputs:
            self._walk(place)
        return self._inputs.pop(place)

    def _walk(self, last: int) -> None:
        hidden = self.links[0].fetch()["hidden"]
        for place, link in enumerate(self.links[:last]):
            with _gathered(link.call.layer, stays=place == last - 1):  # whose backward is next
                hidden = link.call.finish(hidden, link.call.own_out(hidden, link.fetch()))
            self._inputs[place + 1] = hidden


def _group_of(call: LayerCall, forward_pass: ForwardPass) -> _Group:
    """The group of a layer in this forward pass; the layer that keeps its input begins one."""
    place = call.execution.policy.place
    if place == 0:
        forward_pass.group = _Group()
    group = forward_pass.group
    if not isinstance(group, _Group) or len(group.links) != place:
        raise RuntimeError(
            f"attn_out_every: layer {place} of a group ran, but not those before it in the same forward pass; call "
            "the layers in order, with the functions of one SequenceContext.functions()"
        )
    return group


@contextlib.contextmanager
def _gathered(layer: TransformerBlock, *, stays: bool) -> Iterator[None]:
    """The layer's whole weights, outside of its own forward and backward; all ranks of its FSDP group must call."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    yield
    if not stays:
        layer.reshard()


class _LayerFunction(torch.autograd.Function):
    """One layer. Parameters are inputs, so that their gradients take autograd's own way."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, group: _Group | None, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """[B, T, d]."""
        q, k, v = call.project(hidden)
        out, saved = call.attend(q, k, v)
        if group is not None:  # a backward pass may follow
            ctx.link = _Link(call, call.to_keep(hidden, out, saved))
            ctx.group, ctx.place, ctx.kv_heads = group, len(group.links), k.shape[1]
            group.links.append(ctx.link)
        del q, k, v, saved  # what is not kept is freed before the MLP runs
        return call.finish(hidden, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the parameters."""
        kept = ctx.link.fetch()
        hidden = ctx.group.input_of(ctx.place, kept)
        dx, of_parameters = ctx.link.call.backpropagate(hidden, kept, dy, ctx.kv_heads)
        ctx.link.kept.release()
        return None, None, dx, *of_parameters
