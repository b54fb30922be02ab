"""Activation checkpointing: layers save what their policy names and recompute the rest, whole or tile by tile.

Every part of a transformer layer but attention works row by row, so its backward pass is a chain of steps that each
need few tensors:

    x -> project -> q, k, v        recomputed unless saved
    q, k, v -> attention           recomputed for the rows only whose (out, lse) were not saved (memory policies)
    x, out -> finish               recomputed with a graph, without its last matmul; dy -> dx, dout
    dout -> attention backward     dq, dk, dv
    x -> project                   a graph for the gradients only, no matmul at all; dq, dk, dv -> dx

With tiles every step but attention runs on a few rows at a time, so no tensor of [rows, ffn_hidden_size] exists. Saved
tensors go through a store, to device or host memory. When the attention plan itself has its chunks in host memory, the
layer's inputs and results are there as well. Tiles need no communication, so ranks may have different numbers of them.

All state is in the autograd context: evaluation, several micro-batches in flight and exceptions leave none behind.

References: Chen et al. 2016; Gu et al. 2024 and Sun et al. 2025 (engine.planning.checkpoint_policy); Yao et al. 2024
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
from engine.activations.module_call import run_module
from engine.activations.saved import offloaded
from engine.activations.store import ActivationStore, DeviceStore, HostStore, SavedTensors
from engine.attention.runtime import ForwardPass, PlannedAttention
from engine.model.decoder import AttentionFn, Decoder
from engine.model.dropout import Dropout
from engine.model.llama import TransformerBlock


def apply_policies(model: Decoder, executions: Sequence[LayerExecution]) -> None:
    """Replace the forward of every layer by one that follows its `LayerExecution`, in place.

    Layers with a policy other than `none`, or with tiles, must then be called with attention that has a `runtime`
    (`engine.attention.runtime.PlannedAttention`).

    Args:
        model: Before FSDP2 wraps its layers.
        executions: One per layer, in order.
    """
    model.activation_store = executions[0].store
    for index, (layer, execution) in enumerate(zip(model.layers, executions, strict=True)):
        if isinstance(layer, TransformerBlock):
            run = run_of(layer, execution)
        else:
            run = functools.partial(run_module, layer, layer.forward, execution, model.routers_of(index))
        if run is not None:
            # Set on the instance: FSDP's hooks wrap the call, so weights are gathered before forward and backward.
            layer.forward = run
    for layer, before, execution in zip(model.layers[1:], executions, executions[1:], strict=False):
        if isinstance(before.store, HostStore) and execution.store is not before.store:
            layer.register_forward_hook(functools.partial(_wait_pending, before.store))


def _wait_pending(store: HostStore[Any], *_: Any) -> None:
    """Forward hook of the first layer that saves on the device: release the sources of the copies to the host.

    The copies of the layers before had the time of this layer to complete. Without it their device memory would be held
    until backward, since no later `save` waits for them.
    """
    store.wait_pending()


def run_of(layer: TransformerBlock, execution: LayerExecution) -> Callable[..., Tensor] | None:
    """Return the function that replaces the layer's forward, or None to leave it to autograd."""
    if execution.policy.kind != "none" or execution.tile_tokens is not None:
        # torch.compile cannot trace the messages of attention; it compiles the layer's two halves by themselves.
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
    """Run TransformerBlock.forward; all that autograd saves goes to the store."""
    # Tensors that every layer uses stay where they are: offloading would copy them once per layer and free nothing.
    shared = [*layer.parameters(), cos, sin, *([] if dropout is None else [dropout.keys])]
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
    """Run TransformerBlock.forward as `execution` says, by a custom autograd function."""
    function = attention if isinstance(attention, PlannedAttention) else PlannedAttention(attention.runtime)
    call = LayerCall(layer, execution, cos, sin, function.runtime, hidden.device, dropout)
    group = _group_of(call, function.forward_pass) if torch.is_grad_enabled() else None
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    out: Tensor = _LayerFunction.apply(call, group, hidden, *parameters)  # type: ignore[no-untyped-call]
    return out


class _CallRecord:
    """One call of a layer in the forward pass, with the tensors that it saved."""

    def __init__(self, call: LayerCall, tensors: dict[str, Tensor]) -> None:
        # Results of a plan on host memory are there already: a HostStore would copy them a second time.
        store = DeviceStore() if call.runtime.on_host else call.execution.store
        self.call, self._names = call, tuple(tensors)
        self.saved: SavedTensors = store.save(list(tensors.values()))

    def fetch(self) -> dict[str, Tensor]:
        """Return the saved tensors by name."""
        return dict(zip(self._names, self.saved.fetch(), strict=True))


class _Group:
    """Layers of one forward pass of which only the first saves its input (policy attn_out_every).

    The inputs of the others are recomputed from it: with attention's out saved, one layer's output is only `finish`.
    """

    def __init__(self) -> None:
        self.records: list[_CallRecord] = []
        self._inputs: dict[int, Tensor] = {}  # recomputed and not used yet, by index of the layer in the group

    def input_of(self, index: int, saved: dict[str, Tensor]) -> Tensor:
        """Return the input [B, T, d] of layer `index` of the group, of which `saved` was fetched.

        Backward reaches the last layer of the group first. That call recomputes the inputs of all layers up to it.
        """
        if "hidden" in saved:
            return saved["hidden"]
        if index not in self._inputs:
            self._recompute_inputs(index)
        return self._inputs.pop(index)

    def _recompute_inputs(self, last: int) -> None:
        hidden = self.records[0].fetch()["hidden"]
        for index, record in enumerate(self.records[:last]):
            # The weights of the last layer stay gathered: its own backward pass comes soon and needs them.
            with _gathered(record.call.layer, leave_gathered=index == last - 1):
                hidden = record.call.finish(hidden, record.call.local_out(hidden, record.fetch()))
            self._inputs[index + 1] = hidden


def _group_of(call: LayerCall, forward_pass: ForwardPass) -> _Group:
    """Return the group of a layer in this forward pass; a layer that saves its input starts a new one."""
    index = call.execution.policy.index
    if index == 0:
        forward_pass.group = _Group()
    group = forward_pass.group
    if not isinstance(group, _Group) or len(group.records) != index:
        raise RuntimeError(
            f"attn_out_every: layer {index} of a group ran, but not those before it in the same forward pass; call "
            "the layers in order, with the functions of one SequenceContext.functions()"
        )
    return group


@contextlib.contextmanager
def _gathered(layer: TransformerBlock, *, leave_gathered: bool) -> Iterator[None]:
    """Gather the layer's weights outside its forward and backward; `leave_gathered` skips the reshard at the end.

    Collective over the FSDP group.
    """
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    yield
    if not leave_gathered:
        layer.reshard()


class _LayerFunction(torch.autograd.Function):
    """One layer. Parameters are inputs, so that autograd accumulates their gradients, where FSDP2 expects them."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, group: _Group | None, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] for hidden [B, T, d]."""
        q, k, v = call.project(hidden)  # [T, B*H, D], [T, B*K, D]
        out, saved = call.attend(q, k, v)
        if group is not None:  # a backward pass may follow
            ctx.record = _CallRecord(call, call.tensors_to_save(hidden, out, saved))
            ctx.group, ctx.index, ctx.kv_heads = group, len(group.records), k.shape[1]
            group.records.append(ctx.record)
        del q, k, v, saved  # free what is not saved before the MLP allocates
        return call.finish(hidden, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden and of the parameters for dy [B, T, d]."""
        saved = ctx.record.fetch()
        hidden = ctx.group.input_of(ctx.index, saved)
        dx, of_parameters = ctx.record.call.backpropagate(hidden, saved, dy, ctx.kv_heads)
        ctx.record.saved.release()
        return None, None, dx, *of_parameters
