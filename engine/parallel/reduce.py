"""A few numbers reduced over all ranks; every rank of the run must call, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
