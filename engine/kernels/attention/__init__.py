"""Tile kernels behind one interface, chosen once at start by what they declare."""

from __future__ import annotations

import torch

from engine.config.settings import KernelName
from engine.kernels.attention.base import KernelRequest, TileKernel
from engine.kernels.attention.choice import KERNELS, KernelChoice, choose
from engine.kernels.attention.trial import trial_problem

__all__ = ["KERNELS", "KernelChoice", "TileKernel", "select_kernel"]


def select_kernel(
    name: KernelName,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    windows: bool = False,
    deterministic: bool = False,
    documents: bool = False,
    v_dim: int | None = None,
) -> KernelChoice:
    """The named kernel, or for `auto` the fastest that can run here, with the reasons; ConfigError says what would be
    legal. See KernelRequest; torch's deterministic mode asks for it, too.

    What is taken has passed its trial on `device`: the first time that takes up to a second, and compiling.
    """
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    request = KernelRequest(
        device.type,
        dtype,
        head_dim,
        torch.cuda.get_device_capability(device) if on_gpu else None,
        windows,
        deterministic or torch.are_deterministic_algorithms_enabled(),
        documents,
        v_dim,
    )
    return choose(name, request, lambda kind: trial_problem(kind, request, device))
