"""Collectives for sharded and tensor parallelism, and reductions of a few numbers over all ranks.

All functions are collective: every rank of the group (of the run, if there is no group) must call, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and warns of the old names, the only ones in 2.11.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_objects(local: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a picklable object; return those of all ranks, in order of rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return gathered


def all_gather_first(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the first dimension over the t ranks of `group`, [n, ...] -> [t * n, ...], a new tensor."""
    gathered = torch.empty(group.size() * local.shape[0], *local.shape[1:], dtype=local.dtype, device=local.device)
    all_gather_into(gathered, local.contiguous(), group=group)
    return gathered


def reduce_scatter_first(values: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None) -> Tensor:
    """Reduce-scatter along the first dimension over the t ranks of `group`, [t * n, ...] -> [n, ...].

    Sums in the dtype of `values`. Writes to `out` if given, else to a new tensor.
    """
    if out is None:
        out = torch.empty(values.shape[0] // group.size(), *values.shape[1:], dtype=values.dtype, device=values.device)
    reduce_scatter_into(out, values.contiguous(), group=group)
    return out


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum `values` over all ranks in place, and return them."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Sequence[float | None], device: torch.device) -> list[float | None]:
    """Return the maximum of each number over all ranks; None where no rank has one. Numbers must not be negative."""
    table = torch.tensor([-1.0 if value is None else float(value) for value in values], dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [None if value < 0 else value for value in table.tolist()]


def wait_for_all_ranks() -> None:
    """Block until every rank has called it (a barrier)."""
    dist.all_reduce(torch.zeros(()))  # a CPU tensor, so gloo blocks the host; NCCL would only enqueue
