"""A process of its own in which Triton runs kernels through its interpreter, on CPU tensors.

Triton reads TRITON_INTERPRET when it is imported and when a kernel is defined, so a process has either real kernels or
interpreted ones.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

TIMEOUT_S = 120.0


class Interpreter:
    """Runs functions of importable modules in that process; it starts at the first call."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns; what it raises is raised here."""
        return self._process.submit(function, *args).result(TIMEOUT_S)

    def close(self) -> None:
        """Ends the process."""
        self._process.shutdown(cancel_futures=True)


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # A GPU says nothing of exp(1e4) or log(0) either.
    np.seterr(all="ignore")
