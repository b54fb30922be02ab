"""Tile kernels behind one interface, chosen once at start by what they declare."""

from __future__ import annotations

import torch

from engine.attention.kernels.base import TileKernel
from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.kernels.cuda import AtenCudnnKernel, AtenFlashKernel, FlashAttnKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.config import KernelName
from engine.errors import ConfigError

__all__ = ["KERNELS", "TileKernel", "choose_kernel"]

KERNELS: dict[KernelName, type[TileKernel]] = {
    "reference": ReferenceKernel,
    "cpu_flash": CpuFlashKernel,
    "aten_flash": AtenFlashKernel,
    "aten_cudnn": AtenCudnnKernel,
    "flash_attn": FlashAttnKernel,
}


def choose_kernel(name: KernelName, device: torch.device, dtype: torch.dtype, head_dim: int) -> TileKernel:
    """The named kernel, or for `auto` the fastest that can run here; ConfigError says what would be legal.

    auto: CPU cpu_flash; CUDA flash_attn if installed, else cuDNN from compute capability 9.0 on, else aten_flash.
    """
    candidates = _preference(device) if name == "auto" else [name]
    reasons = []
    for candidate in candidates:
        kernel = KERNELS[candidate]()
        problem = _unfit(kernel, device, dtype, head_dim)
        if problem is None:
            return kernel
        reasons.append(f"{candidate}: {problem}")
    legal = [n for n in KERNELS if _unfit(KERNELS[n](), device, dtype, head_dim) is None]
    raise ConfigError(
        f"attention.kernel={name}: no kernel for {dtype} with head_dim {head_dim} on {device.type} "
        f"({'; '.join(reasons)}); legal here: {', '.join(legal)}"
    )


def _preference(device: torch.device) -> list[KernelName]:
    if device.type != "cuda":
        return ["cpu_flash"]
    order: list[KernelName] = ["flash_attn"] if FlashAttnKernel.is_installed() else []
    hopper = torch.cuda.get_device_capability(device)[0] >= 9
    return [*order, "aten_cudnn", "aten_flash"] if hopper else [*order, "aten_flash"]


def _unfit(kernel: TileKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    can = kernel.capabilities
    if device.type not in can.devices:
        return f"runs on {', '.join(sorted(can.devices))} only"
    if dtype not in can.dtypes:
        return f"takes {', '.join(sorted(str(d).removeprefix('torch.') for d in can.dtypes))} only"
    if head_dim > can.max_head_dim:
        return f"takes head_dim up to {can.max_head_dim}"
    if isinstance(kernel, FlashAttnKernel) and not kernel.is_installed():
        return "the flash-attn package is not installed"
    return None
