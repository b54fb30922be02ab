"""Walking a tensor in blocks of rows, so that wide temporaries are bounded and, on a CPU, stay in cache.

Statistics, rotations and softmax are computed in fp32 whatever the dtype of the tensors. A whole fp32 copy would be
written to and read from main memory by every operation; a block of it lives in cache from the first to the last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Measured on 2 cores with 1 MiB of L2 each: 2**18 to 2**20 elements are equally fast, smaller ones pay for calls.
CPU_BLOCK_ELEMENTS = 2**19
# On an accelerator blocks only bound memory (256 MiB of fp32 per temporary); each costs a few kernel launches.
ACCELERATOR_BLOCK_ELEMENTS = 2**26


def row_blocks(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover [0, rows) in order, each of at least one row and about one block of elements."""
    limit = CPU_BLOCK_ELEMENTS if device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS
    step = max(1, limit // max(1, row_elements))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums over values of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` [rows, ...] times the scalar tensor `scale`, rounded once, to `dtype`; a new tensor.

    A plain product of a bf16 tensor and a scalar tensor rounds the scalar to bf16 first.
    """
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    wide = accumulate_dtype(values.dtype)
    factor = scale.to(wide)
    row_elements = values[0].numel() if values.shape[0] else 1
    for rows in row_blocks(values.shape[0], row_elements, values.device):
        out[rows].copy_(values[rows].to(wide) * factor)
    return out
