"""FlashAttention from its own packages: flash-attn (2), flash_attn_3 and flash-attn-4, each called directly.

All take [1, rows, heads, D] and give lse [1, H, rows] in fp32, natural logarithm. What is called of them, by version,
is data of tests/testkit/flash_signatures.py.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.attention.base import (
    ON_CUDA,
    KernelRequest,
    LibraryKernel,
    TileGradients,
    TileResult,
)
from engine.kernels.attention.cuda import flash2_problem, window_calls, window_of
from engine.planning.visibility.mask import Band


def package_problem(module: str, package: str) -> str | None:
    """Why `module` of a package cannot be used, or None. Loads it: one built for another torch shows itself then."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever the package runs when it is loaded
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return f"{package} is not installed (no module {module})"
        return f"{package} is installed, but cannot be loaded ({type(error).__name__}: {error})"
    return None


class PackageKernel(LibraryKernel):
    """One call of a package over tensors [1, rows, heads, D]."""

    module: str

    @property
    def library(self) -> Any:
        """The module that has the calls; packages have no types."""
        return importlib.import_module(self.module)


def _flash_attn_problem(request: KernelRequest) -> str | None:
    return package_problem(FlashAttnKernel.module, "the flash-attn package") or flash2_problem(request)


class FlashAttnKernel(PackageKernel):
    """FlashAttention-2 (flash-attn-4 has a package of the same name without this module)."""

    name = "flash_attn"
    module = "flash_attn.flash_attn_interface"
    capabilities = replace(ON_CUDA, problem=_flash_attn_problem)

    def _calls(self, band: Band) -> list[Band]:
        return window_calls(band)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.library._flash_attn_forward(
            q[None], k[None], v[None], **_flash_attn_options(q, band), return_softmax=False
        )
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        result = TileResult(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
        self.library._flash_attn_backward(
            *_rows_first(grads, q, k, v),
            *(x[None] for x in result),
            **_flash_attn_options(q, band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return result


def _flash_attn_options(q: Tensor, band: Band) -> dict[str, Any]:
    """Return the arguments of both directions: no dropout, soft cap or ALiBi."""
    window = window_of(band)
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": band.is_causal,
        "window_size_left": window.left,
        "window_size_right": window.right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _flash3_problem(request: KernelRequest) -> str | None:
    if request.deterministic and request.head_dim > 192:
        return "has no deterministic backward pass for head_dim above 192"
    return package_problem(Flash3Kernel.module, "flash_attn_3 (PyPI has a placeholder: take a wheel for this torch)")


class Flash3Kernel(PackageKernel):
    """FlashAttention-3: the operators flash_attn_3::fwd and bwd, which its module registers; compiled for Hopper.

    Its Python functions took the window in two ways, its operators always in one. They count windows as `window_of`.
    """

    name = "fa3"
    module = "flash_attn_interface"
    capabilities = replace(
        ON_CUDA,
        compute_capabilities=((9, 0), (9, 0)),
        problem=_flash3_problem,
    )

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._operators.fwd(q[None], k[None], v[None], **_flash3_options(q, band), num_splits=1)
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        result = TileResult(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
        self._operators.bwd(  # what it returns has changed; what it writes has not
            *_rows_first(grads, q, k, v),
            *(x[None] for x in result),
            **_flash3_options(q, band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return result

    @property
    def _operators(self) -> Any:
        assert self.library is not None  # registers them
        return torch.ops.flash_attn_3


def _flash3_options(q: Tensor, band: Band) -> dict[str, Any]:
    """`sm_margin`: SMs that torch leaves free for messages, as matmuls do."""
    window = window_of(band)
    return {
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": band.is_causal,
        "window_size_left": window.left,
        "window_size_right": window.right,
        "sm_margin": torch._C._get_sm_carveout_experimental() or 0,
    }


def _flash4_problem(request: KernelRequest) -> str | None:
    if (request.compute_capability or (9, 0)) >= (10, 0) and 128 < request.head_dim < 256:
        return "has no backward pass for head_dim 129 to 255 on this GPU"
    return package_problem(Flash4Kernel.module, "flash-attn-4")


class Flash4Kernel(PackageKernel):
    """FlashAttention-4, compiled as it is used. Returns more with every version: the first two or three are ours."""

    name = "fa4"
    module = "flash_attn.cute.interface"
    capabilities = replace(
        ON_CUDA,
        compute_capabilities=((9, 0), (11, 0)),
        problem=_flash4_problem,
    )

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        options = _flash4_options(q, band)
        out, lse, *_ = self.library._flash_attn_fwd(q[None], k[None], v[None], **options, return_lse=True)
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        dout, *operands, out, lse = _rows_first(grads, q, k, v)
        dq, dk, dv, *_ = self.library._flash_attn_bwd(
            *operands,
            out,
            dout,
            lse,
            **_flash4_options(q, band),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return TileResult(dq[0], dk[0], dv[0])


def _flash4_options(q: Tensor, band: Band) -> dict[str, Any]:
    """No bound is None here, not -1."""
    left, right = (None if bound < 0 else bound for bound in window_of(band))
    scale = q.shape[-1] ** -0.5
    return {"softmax_scale": scale, "causal": band.is_causal, "window_size_left": left, "window_size_right": right}


def _rows_first(grads: TileGradients, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """dout, q, k, v, out [1, rows, heads, D] and lse [1, H, rows], as backward passes take them."""
    tensors = (grads.dout.contiguous(), q, k, v, grads.out)
    return (*(x[None] for x in tensors), grads.lse.transpose(0, 1).contiguous()[None])
