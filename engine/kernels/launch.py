"""Launches Triton kernels: number of programs, warps, device.

Numbers that stay the same all through a run (widths, epsilons) are compile-time constants: a Python float would reach
the kernel as fp32, and Triton's interpreter cannot count to a number that is a tensor. Numbers of rows are not: tiles
and evaluations have many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from engine.kernels.tiles import power_of_two

MAX_PROGRAMS = 2**31 - 1  # of a grid's first axis


def kernel(function: Callable[..., Any]) -> Any:
    """A typed `triton.jit`."""
    return triton.jit(function)


def launch(function: Any, programs: int, *args: Any, cells: int, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of its first argument, a tensor.

    cells   elements of a program's block; 16 per thread, from 4 to 16 warps
    """
    on = args[0]
    assert isinstance(on, Tensor)
    assert programs <= MAX_PROGRAMS, programs
    if programs == 0:
        return
    warps = max(4, min(16, power_of_two(cells) // (32 * 16)))
    with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]
        # As always until Triton 3.9, which warns that the default will change.
        function[(programs,)](*args, **constants, num_warps=warps, enable_fp_fusion=True)


def as_rows(x: Tensor) -> Tensor:
    """[..., columns] -> [rows, columns] with contiguous columns; a view if strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
