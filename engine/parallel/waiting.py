"""Reports the time this rank is blocked in collectives of FSDP2 and messages of attention to a `WaitClock`.

On a CPU a collective blocks its caller, so its duration is mostly the wait for the last rank. On a GPU the host does
not block, so there is nothing to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.library import ContextParallel
from engine.distributed.collectives import all_gather_into, reduce_scatter_into
from engine.distributed.mesh import Mesh
from engine.distributed.waits import WaitClock
from engine.parallel.fsdp import fsdp_modules


def count_waits(waits: WaitClock, mesh: Mesh, model: nn.Module, attention: ContextParallel) -> bool:
    """Start counting waits; return whether `waits` is complete, so that it may be used to find a straggler.

    Collectives of tensor parallelism and between replicas are not counted. With either, a rank that waits there would
    look like the straggler, so the result is False.
    """
    if mesh.device.type != "cpu":
        return False
    attention.set_wait_clock(waits)
    # FSDP2 does not export the base class of custom collectives.
    all_gather: Any = _Counted(waits, "all_gather", all_gather_into)
    reduce_scatter: Any = _Counted(waits, "reduce_scatter", reduce_scatter_into)
    for module in fsdp_modules(model):
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
    degrees = mesh.degrees
    return degrees.world_size > 1 and degrees.tp_size == degrees.dp_replicate_size == 1


class _Counted:
    """A custom collective for FSDP2 that does what its default does on a CPU, and counts the wait."""

    def __init__(self, waits: WaitClock, name: str, collective: Callable[..., Any]) -> None:
        self._waits = waits
        self._name = name
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        """Run the collective."""
        with self._waits.waiting(self._name):
            return self._collective(output_tensor, input_tensor, *arguments, **options)
