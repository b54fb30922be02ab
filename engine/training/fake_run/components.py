"""Assigns live tensors to components, by the Python functions that led to their allocation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from engine.device.host_memory import is_in_host_memory
from engine.device.live_tensors import Label, LiveTensorTracker

COMPONENTS = (
    "parameters",  # master weights, or the shards of them that this rank holds
    "gradients",  # what the optimizer reads
    "optimizer",  # its state, and its temporaries
    "checkpoints",  # what layers save for the backward pass, and the residual stream between them
    "attention",  # operands, results and buffers of attention
    "communication",  # weights gathered by FSDP, inputs of its reductions, rows gathered for tensor parallelism
    "mlp",  # projections, MLP, norms: everything that works row by row
    "loss",  # logits of a chunk, gradients that the loss forms
    "embedding",  # the lookup and its gradient
    "other",  # tokens, rotary tables, the rest
)
# Storages that outlive a layer's forward pass without being saved for backward: FSDP's and attention's reusable block.
POOLED = "attention pool"
_NOT_SAVED = frozenset({"communication", "parameters", "gradients", "optimizer", POOLED})

# (part of the file's path, function or None for all of them, component); the innermost frame that matches decides.
RULES: tuple[tuple[str, str | None, str], ...] = (
    ("engine/attention/buffers.py", "allocate_bytes", POOLED),
    ("engine/attention/", None, "attention"),
    ("engine/kernels/attention/", None, "attention"),
    ("engine/activations/store.py", None, "checkpoints"),
    ("engine/distributed/collectives.py", None, "communication"),
    # Sums over micro-steps before they are reduced: whole gradients.
    ("torch/distributed/fsdp/", "to_accumulated_grad_if_needed", "gradients"),
    ("torch/distributed/fsdp/", None, "communication"),
    ("engine/loss/", None, "loss"),
    ("engine/optim/adamw.py", None, "optimizer"),
    ("engine/optim/updates.py", None, "optimizer"),
    ("torch/optim/", None, "optimizer"),
    ("torch/nn/modules/sparse.py", None, "embedding"),
    ("engine/model/rope.py", "rope_table", "other"),
    ("engine/model/", None, "mlp"),
    ("engine/activations/checkpointed.py", None, "mlp"),
    ("engine/activations/layer_call.py", None, "mlp"),
    ("torch/nn/modules/linear.py", None, "mlp"),
    ("torch/autograd/graph.py", "_engine_run_backward", "mlp"),  # autograd's own operations: matrix products
)
_OPERATIONS = {"aten::embedding_dense_backward": "embedding"}


def component_of(path: str, function: str) -> str | None:
    """Return the component of what `function` in the file `path` allocates; None: its caller decides."""
    return next((component for part, name, component in RULES if part in path and name in (None, function)), None)


class FrameClassifier:
    """A Classifier by Python frames, with a cache per function.

    host_components   components that are in host memory, whatever allocates them
    """

    def __init__(self, host_components: Iterable[str] = ()) -> None:
        self._host_components = frozenset(host_components)
        self._known: dict[CodeType, str | None] = {}

    def __call__(self, func: Any, tensor: Tensor) -> Label:
        """Return component and location of what `func` has just allocated."""
        component = None if func is None else _OPERATIONS.get(func.name())
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and component is None:
            code, frame = frame.f_code, frame.f_back
            if code not in self._known:
                self._known[code] = component_of(code.co_filename, code.co_name)
            component = self._known[code]
        label = self.label(component or "other")
        return label._replace(on_host=label.on_host or is_in_host_memory(tensor))

    def label(self, component: str) -> Label:
        """Return the label of tensors of `component`."""
        return Label(component, component in self._host_components)


class StepObserver:
    """Reports to a tracker what only a running step shows: phases, gradients, and what layers save.

    Attach it after sharding: the hooks then surround those of FSDP, so a layer's gathered weights are allocated after
    the layer begins and freed before it ends. Gradients are labelled when autograd or FSDP stores them.

    host_layers   number of layers, from the first, that save to host memory
    """

    def __init__(self, tracker: LiveTensorTracker, classifier: FrameClassifier, host_layers: int = 0) -> None:
        self._tracker = tracker
        self._classifier = classifier
        self._host_layers = host_layers
        self._layer_start = 0

    def attach(self, model: nn.Module, layers: Sequence[nn.Module], head: nn.Module) -> None:
        """Add hooks to `model` that enter the phases forward, loss (from `head` on) and backward.

        Within a layer the phase has the layer's position after a slash: `backward/last` (first, inner, inner on host).
        """
        enter = self._tracker.enter
        self._tracker.watch(model.parameters(), self._classifier.label("parameters"))
        model.register_forward_pre_hook(lambda *_: enter("forward"), prepend=True)
        head.register_forward_pre_hook(lambda *_: enter("loss"), prepend=True)
        head.register_forward_hook(lambda *_: enter("backward"))
        positions = ["inner on host" if index < self._host_layers else "inner" for index in range(len(layers))]
        positions[-1], positions[0] = "last", "first"
        for layer, position in zip(layers, positions, strict=True):
            self._attach_layer(layer, position)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._store_gradient)  # type: ignore[no-untyped-call]

    def _attach_layer(self, layer: nn.Module, position: str) -> None:
        def begin(layer: nn.Module, args: tuple[Any, ...]) -> None:
            self._tracker.enter(f"forward/{position}")
            self._layer_start = self._tracker.moment
            self._tracker.watch([args[0]], self._classifier.label("checkpoints"))

        def end(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self._tracker.relabel_since(self._layer_start, "checkpoints", exclude=_NOT_SAVED)
            if output.requires_grad:  # when its gradient arrives, the layer's backward pass begins
                enter = self._tracker.enter
                output.register_hook(lambda _: enter(f"backward/{position}"))  # type: ignore[no-untyped-call]

        layer.register_forward_pre_hook(begin, prepend=True)
        layer.register_forward_hook(end)

    def _store_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.watch([parameter.grad], self._classifier.label("gradients"))


def by_component(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of every component, in the order of `COMPONENTS`; POOLED counts as attention."""
    totals = dict.fromkeys(COMPONENTS, 0)
    for name, size in sizes.items():
        totals["attention" if name == POOLED else name] += size
    return totals
