"""Bitwise reproducible runs: torch's deterministic algorithms and the settings that they need.

On a CPU runs are deterministic already. On a GPU some kernels sum in the order in which threads finish: mainly backward
passes of attention, index_add and scatter_add, and cuBLAS if streams share its workspace. torch chooses deterministic
algorithms where it has them and raises where it has none; attention kernels declare what they support
(`engine.kernels.attention.base`). The order in which NCCL sums is fixed for the same ranks on the same machines.
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
    """Enable torch's deterministic mode inside the body, if `enabled`; enter before anything is computed on a GPU."""
    if not enabled:
        yield
        return
    # 8 buffers of 4 MiB; cuBLAS reads the variable when the first handle is created.
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), _SETTINGS.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _SETTINGS.fill_uninitialized_memory = False  # the mode would fill new memory with NaN, an extra pass over it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        _SETTINGS.fill_uninitialized_memory = before[1]
