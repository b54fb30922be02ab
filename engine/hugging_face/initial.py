"""How transformers initialises a model, found by running its `_init_weights` on the meta device.

The trainer draws the values itself (`engine.model.init`), so that they depend on the seed alone and not on how the
weights are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.decoder import Initial

UNINITIALISED = "transformers leaves it uninitialised"
_FLAG = "_is_hf_initialized"  # transformers skips tensors and modules with it


Write = tuple[Any, Tensor, tuple[Any, ...]]  # operation, its target, its other arguments


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the operations that write into tensors, by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage: dict[int, list[Write]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run `func`, and note what it writes to."""
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            key = args[0].untyped_storage()._cdata
            self.by_storage.setdefault(key, []).append((func, args[0], args[1:]))
        return func(*args, **(kwargs or {}))


def initial_values(model: Any) -> dict[str, Initial | str]:
    """Return the distribution of every parameter and buffer of a transformers model on the meta device, by name.

    A text says why a tensor's values cannot be drawn here.
    """
    for module in model.modules():
        module.__dict__.pop(_FLAG, None)
    for tensor in model.parameters():
        tensor.__dict__.pop(_FLAG, None)
    return written_values(model, model.initialize_weights)


def written_values(model: nn.Module, initialise: Callable[[], Any]) -> dict[str, Initial | str]:
    """Return the distribution that `initialise` leaves in every parameter and buffer of a model on the meta device."""
    with _Writes() as writes:
        initialise()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _initial(tensor, writes.by_storage) for name, tensor in named}


def _initial(tensor: Tensor, by_storage: Mapping[int, Sequence[Write]]) -> Initial | str:
    """Return the distribution that the writes leave in a tensor."""
    found: Initial | str = UNINITIALISED
    for func, target, arguments in by_storage.get(tensor.untyped_storage()._cdata, ()):
        name = func._schema.name.removeprefix("aten::")
        if target.numel() != tensor.numel():
            # The row of the padding token.
            if isinstance(found, str) or name != "zero_" or target.numel() * tensor.shape[0] != tensor.numel():
                return f"transformers initialises parts of it ({name})"
            row = int(target.storage_offset()) // int(tensor.stride(0))
            found = found._replace(zero_rows=(*found.zero_rows, row))
        elif name == "normal_":
            mean, std = (*map(float, arguments), *(0.0, 1.0)[len(arguments) :])
            found = Initial(mean, std)
        elif name == "uniform_":
            low, high = (*map(float, arguments), *(0.0, 1.0)[len(arguments) :])
            found = Initial((low + high) / 2, (high - low) / math.sqrt(12), kind="uniform")
        elif name == "zero_":
            found = Initial(0.0, 0.0)
        elif name == "copy_" and (drawn := _log_of_uniform(arguments[0], by_storage)) is not None:
            found = drawn
        elif name == "fill_" and not isinstance(arguments[0], Tensor):
            found = Initial(float(arguments[0]), 0.0)
        else:
            found = f"transformers initialises it by {name}"
    return found


def _log_of_uniform(source: Tensor, by_storage: Mapping[int, Sequence[Write]]) -> Initial | None:
    """Return the distribution of a tensor that was drawn uniformly and whose logarithm was taken in place."""
    writes = by_storage.get(source.untyped_storage()._cdata, ())
    names = [func._schema.name.removeprefix("aten::") for func, _, _ in writes]
    if names != ["uniform_", "log_"]:
        return None
    low, high = map(float, writes[0][2])
    return Initial((low + high) / 2, (high - low) / math.sqrt(12), kind="log_uniform")


def fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers of a transformers model on `device`, as its code does, and leave its parameters alone."""
    for module in model.modules():
        module.__dict__.pop(_FLAG, None)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for parameter in model.parameters():
        setattr(parameter, _FLAG, True)
    model.initialize_weights()
