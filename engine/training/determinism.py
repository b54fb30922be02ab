"""Equal bits from equal runs: torch's deterministic algorithms, and what they need besides.

On a CPU runs are deterministic by themselves. On a GPU some kernels add numbers up in the order in which threads
happen to finish: the backward passes of attention above all, index_add and scatter_add, and cuBLAS when streams share
its workspace. Torch takes other algorithms where it has them and raises where it has none; kernels of attention say for
themselves what they can (`engine.kernels.attention.base`). What remains is the order in which NCCL sums, which is the
same for the same ranks on the same machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_SETTINGS: Any = torch.utils.deterministic  # a module whose attributes are made at run time
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Torch's deterministic mode inside the body, if `enabled`; enter it before anything is computed on a GPU.

    New memory is not filled with NaN, which the mode does by itself: no result depends on it, and it would take a pass
    over all memory.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")  # read when the first handle is made; 8 buffers of 4 MiB
    before = torch.are_deterministic_algorithms_enabled(), _SETTINGS.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _SETTINGS.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        _SETTINGS.fill_uninitialized_memory = before[1]
