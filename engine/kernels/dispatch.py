"""Decides whether an operation on a tensor runs as a Triton kernel or in torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch
from torch import Tensor


def uses_triton(tensor: Tensor) -> bool:
    """Return whether to use Triton kernels for `tensor`: it is on a GPU, and Triton can compile.

    Never while torch.compile traces: it makes kernels of its own out of torch's operations. On CPU tensors only where
    TRITON_INTERPRET=1 asks Triton for its interpreter, which runs the same kernels, very slowly, without a GPU.
    """
    if torch.compiler.is_compiling():  # first: Dynamo warns of every cached function that it traces
        return False
    return (_compiles() if tensor.is_cuda else tensor.is_cpu and _interprets()) and tensor.is_floating_point()


@functools.cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and _is_installed()


@functools.cache
def _compiles() -> bool:
    """Triton builds the code that launches a kernel with a C compiler, found as `triton.runtime.build` finds it."""
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("gcc", "clang")))
    return _is_installed() and has_compiler


@functools.cache
def _is_installed() -> bool:
    found = importlib.util.find_spec("triton")
    return found is not None and found.origin is not None  # a folder of that name is no package
