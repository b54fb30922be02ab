"""Runs a decoder layer whose code is not ours by its memory policy: what it saves, and what backward computes again.

    none       what autograd saves, on the device or by saved-tensor hooks on the host
    full       the layer's differentiable inputs; backward runs the whole layer again
    attn_out   its inputs and attention's results; backward runs the layer again, with these results in attention's
               place. Likewise seq_fraction, for the queries whose results are saved

The layer is called as its model calls it: hidden states first, and `sequence` (`engine.hugging_face.sequence`) among
the keyword arguments. All state is in the autograd context and in `sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from engine.activations.layer_call import LayerExecution, leaf
from engine.activations.saved import offloaded
from engine.activations.store import DeviceStore, HostStore
from engine.attention.runtime import SavedResults
from engine.hugging_face.experts import Routed, router_logits
from engine.hugging_face.sequence import LayerSequence


def run_module(
    layer: nn.Module,
    forward: Callable[..., Any],
    execution: LayerExecution,
    routers: tuple[tuple[nn.Module, ...], int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return what `forward`, the layer's own, returns for these arguments.

    Args:
        layer: Owns the parameters.
        forward: The layer's forward as its class defines it.
        execution: Policy and store.
        routers: Router modules of the layer and the index of logits in their outputs.
        args: As the model gives them; hidden states [B, T, d] first.
        kwargs: As the model gives them.
    """
    call = ModuleCall(layer, forward, routers, args, kwargs)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if execution.policy.kind != "none":
        return call.checkpointed(execution)
    if not isinstance(execution.store, HostStore):
        return call.plain()
    shared = [*layer.parameters(), *call.constants()]  # tensors that live on anyway
    with offloaded(execution.store, leave=shared):
        return call.plain()


class ModuleCall:
    """One call of a layer with its arguments.

    Its `inputs` are hidden states and all other tensors that need a gradient, such as embeddings per layer; they can be
    replaced. The call keeps the rest of the arguments, which all layers share.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        routers: tuple[tuple[nn.Module, ...], int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.layer, self._forward, self._routers = layer, forward, routers
        self.sequence: LayerSequence = kwargs["sequence"]
        leaves, self._spec = tree_flatten((args, kwargs))
        self._input_at = [
            index
            for index, value in enumerate(leaves)
            if isinstance(value, Tensor) and (index == 0 or value.requires_grad)
        ]
        self.inputs: list[Tensor] = [leaves[index] for index in self._input_at]
        self._leaves = leaves

    @property
    def routes(self) -> bool:
        """Whether the layer has experts."""
        return bool(self._routers[0])

    def constants(self) -> list[Tensor]:
        """Return the tensors among the arguments that are no inputs."""
        return [x for index, x in enumerate(self._leaves) if isinstance(x, Tensor) and index not in self._input_at]

    def parameters(self) -> list[nn.Parameter]:
        """Return the layer's trained parameters."""
        return [parameter for parameter in self.layer.parameters() if parameter.requires_grad]

    def run(self, inputs: list[Tensor], sequence: LayerSequence) -> tuple[Any, Routed | None]:
        """Return the layer's output for other inputs, and what its routers chose."""
        leaves = list(self._leaves)
        for index, value in zip(self._input_at, inputs, strict=True):
            leaves[index] = value
        args, kwargs = tree_unflatten(leaves, self._spec)
        modules, index = self._routers
        routing = sequence.routing
        with router_logits(modules if routing is not None else (), index) as logits:
            output = self._forward(*args, **{**kwargs, "sequence": sequence})
        return output, routing.of_logits(logits) if routing is not None and logits else None

    def plain(self) -> Any:
        """Run the layer under autograd."""
        output, routed = self.run(self.inputs, self.sequence)
        if routed is not None and self.sequence.routing is not None:
            self.sequence.routing.add(routed)
        return output

    def checkpointed(self, execution: LayerExecution) -> Any:
        """Run the layer by a custom autograd function, which saves what the policy names."""
        inputs, self.inputs = self.inputs, []
        for index in self._input_at:
            self._leaves[index] = None  # saved in a store, not here
        result = _Result()
        tensors = _ModuleFunction.apply(self, execution, result, len(inputs), *inputs, *self.parameters())  # type: ignore[no-untyped-call]
        if result.counts is not None and self.sequence.routing is not None:
            self.sequence.routing.add(Routed(tensors[-1], result.counts))
            tensors = tensors[:-1]
        return tree_unflatten(result.leaves_with(tensors), result.spec)


class _Result:
    """What the forward pass of `_ModuleFunction` returns beside tensors: the form of the output."""

    def __init__(self) -> None:
        self.spec: Any = None
        self.leaves: list[Any] = []
        self.counts: Tensor | None = None

    def leaves_with(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """Return the leaves of the output, with these tensors in the places of tensors."""
        remaining = iter(tensors)
        return [next(remaining) if value is Tensor else value for value in self.leaves]


class _ModuleFunction(torch.autograd.Function):
    """One layer. Parameters are inputs, so that autograd accumulates their gradients, where FSDP2 expects them."""

    @staticmethod
    def forward(
        ctx: Any, call: ModuleCall, execution: LayerExecution, result: _Result, num_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tensors of the layer's output, then the routers' probabilities if it has any."""
        inputs = [tensor.detach() for tensor in tensors[:num_inputs]]
        saves_attention = execution.policy.kind != "full"
        sequence = call.sequence.recorded() if saves_attention else call.sequence
        output, routed = call.run(inputs, sequence)
        results = [part for saved in getattr(sequence, "results", ()) for part in (saved.out, saved.lse)]
        # Results of a plan on host memory are there already: a HostStore would copy them a second time.
        on_host = any(part.device != inputs[0].device for part in results)
        ctx.call, ctx.num_inputs, ctx.saves_attention = call, num_inputs, saves_attention
        ctx.saved = (DeviceStore() if on_host else execution.store).save([*inputs, *results])
        leaves, result.spec = tree_flatten(output)
        found = [value for value in leaves if isinstance(value, Tensor)]
        result.leaves = [Tensor if isinstance(value, Tensor) else value for value in leaves]
        ctx.set_materialize_grads(False)
        if routed is not None:
            result.counts = routed.counts
            found.append(routed.probabilities)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and parameters."""
        call: ModuleCall = ctx.call
        saved = ctx.saved.fetch()
        needs = ctx.needs_input_grad[4 : 4 + ctx.num_inputs]
        inputs = [leaf(x) if need else x for x, need in zip(saved[: ctx.num_inputs], needs, strict=True)]
        results = saved[ctx.num_inputs :]
        attention_results = [SavedResults(out, lse) for out, lse in zip(results[::2], results[1::2], strict=True)]
        sequence = call.sequence.replayed(attention_results) if ctx.saves_attention else call.sequence
        with torch.enable_grad():
            output, routed = call.run(inputs, sequence)
            outputs = [value for value in tree_flatten(output)[0] if isinstance(value, Tensor)]
        if routed is not None:
            outputs.append(routed.probabilities)
        reached = [
            (out, dout) for out, dout in zip(outputs, douts, strict=True) if dout is not None and out.requires_grad
        ]
        parameters = call.parameters()
        wanted = [*(x for x, need in zip(inputs, needs, strict=True) if need), *parameters]
        gradients = list(
            torch.autograd.grad([out for out, _ in reached], wanted, [dout for _, dout in reached], allow_unused=True)
        )
        del outputs, output, routed, reached
        ctx.saved.release()
        of_inputs = [gradients.pop(0) if need else None for need in needs]
        if call.routes:
            # An expert that no row of this rank chose; FSDP2 reduces the parameters that have a gradient, which must
            # be the same ones on every rank.
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for gradient, parameter in zip(gradients, parameters, strict=True)
            ]
        return None, None, None, None, *of_inputs, *gradients
