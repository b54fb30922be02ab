"""Where a rank waits for others on the host, told to a `WaitClock`: collectives of FSDP2, messages of the attention.

On a CPU every collective blocks its caller, so the time in it is the time spent waiting for the last rank, and a little
for the bytes. On a GPU the host does not wait, and there is nothing to see here.
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
    """Whether `waits` from now on sees all that this rank waits for; where it would see a part only, it sees none.

    Collectives of tensor parallelism and between replicas are not counted, and a rank that waits there unseen would
    look like the one that others wait for.
    """
    if mesh.device.type != "cpu":
        return False
    attention.set_wait_clock(waits)
    # FSDP2 has a base class for them, which it does not export.
    all_gather: Any = _Counted(waits, "all_gather", all_gather_into)
    reduce_scatter: Any = _Counted(waits, "reduce_scatter", reduce_scatter_into)
    for module in fsdp_modules(model):
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
    degrees = mesh.degrees
    return degrees.world_size > 1 and degrees.tp_size == degrees.dp_replicate_size == 1


class _Counted:
    """A collective of FSDP2's, as its own are on a CPU, counted."""

    def __init__(self, waits: WaitClock, name: str, collective: Callable[..., Any]) -> None:
        self._waits = waits
        self._name = name
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        """The collective of all ranks."""
        with self._waits.waiting(self._name):
            return self._collective(output_tensor, input_tensor, *arguments, **options)
