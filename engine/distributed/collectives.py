"""The collectives of sharded and tensor parallelism, and a few numbers reduced over all ranks.

Every rank of the group, or of the run, must call, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and warns of the older names, which 2.11 has only.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of the group, or of the run, gives, in order of rank. All must call."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    return told


def all_gather_first(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[t * n, ...]: the tensors [n, ...] of the group's t ranks, in order of rank; a new tensor. All must call."""
    gathered = torch.empty(group.size() * own.shape[0], *own.shape[1:], dtype=own.dtype, device=own.device)
    all_gather_into(gathered, own.contiguous(), group=group)
    return gathered


def reduce_scatter_first(values: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None) -> Tensor:
    """[n, ...]: this rank's part of the sum over the group's t ranks of `values` [t * n, ...]; `out` or a new tensor.

    Summed in the dtype of `values`. All ranks of the group must call.
    """
    if out is None:
        out = torch.empty(values.shape[0] // group.size(), *values.shape[1:], dtype=values.dtype, device=values.device)
    reduce_scatter_into(out, values.contiguous(), group=group)
    return out


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` summed over all ranks, in place."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Sequence[float | None], device: torch.device) -> list[float | None]:
    """The largest of each number over all ranks; None where no rank has one. Numbers must not be negative."""
    table = torch.tensor([-1.0 if value is None else float(value) for value in values], dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [None if value < 0 else value for value in table.tolist()]


def wait_for_all_ranks() -> None:
    """Returns when every rank has come here."""
    dist.all_reduce(torch.zeros(()))  # on the CPU, where gloo is always present
