"""CUDA kernels inside torch: its FlashAttention and cuDNN operators.

All take the global lse and a surrogate out in backward and have grouped heads natively. Causal tiles are square, where
top-left and bottom-right alignment agree; general bands become FlashAttention's windows, which count from the bottom
right. cuDNN has no windows here, so its kernel hands such tiles to FlashAttention.

Offsets inside these kernels are partly 32-bit, and backward takes memory for every element: large tiles come in parts
of their heads (`engine.kernels.attention.heads`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention.base import (
    ON_CUDA,
    KernelRequest,
    LibraryKernel,
    TileGradients,
    TileResult,
)
from engine.planning.visibility.mask import Band, row_strips

_CUDNN_VERSION = 90000  # the first whose attention torch uses


class Window(NamedTuple):
    """Keys that a query sees left and right of its own, aligned at the bottom right corner; -1: all."""

    left: int
    right: int


def window_of(band: Band) -> Window:
    """The window that a band (without empty rows or columns) is: i + nk - nq - left <= j <= i + nk - nq + right."""
    shift = band.num_keys - band.num_queries
    if band.is_causal:
        assert shift == 0, band
        return Window(-1, -1)  # the causal flag expresses it
    left, right = band.high + shift, -shift - band.low
    assert min(left, right) >= 0, band
    return Window(left if band.hides_earlier else -1, right if band.hides_later else -1)


def understood(window: Window, num_queries: int, num_keys: int) -> bool:
    """Whether FlashAttention-2 computes this window and no other.

    It takes a bound of num_keys or more for none (mha_fwd in flash_api.cpp) and a missing one beside another for
    num_keys. With more queries than keys both may be wrong on the right, where num_queries - 1 is the farthest key.
    """
    left, right = (-1 if bound >= num_keys else bound for bound in window)
    if left < 0 <= right:
        left = num_keys
    if right < 0 <= left:
        right = num_keys
    wanted, meant = (
        [
            limit if bound < 0 else min(bound, limit)
            for bound, limit in zip(pair, (num_keys - 1, num_queries - 1), strict=True)
        ]
        for pair in (window, (left, right))
    )
    return wanted == meant


def window_calls(band: Band) -> list[Band]:
    """Split a band into calls that FlashAttention's windows can express; one, unless there are more queries than keys.

    With at most as many queries as keys a band can always be expressed, so it is split into strips of that many rows.
    """
    if band.kind != "band" or understood(window_of(band), band.num_queries, band.num_keys):
        return [band]
    return [call for strip in row_strips(band, band.num_keys) for call in window_calls(strip)]


def flash2_problem(request: KernelRequest) -> str | None:
    """FlashAttention-2 has no backward for these heads on GPUs with little shared memory (sdp_utils.cpp of torch)."""
    small = request.compute_capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
    if small and 192 < request.head_dim <= 224:
        return "has no backward pass for head_dim 193 to 224 on this GPU"
    return None


class AtenFlashKernel(LibraryKernel):
    """FlashAttention-2 as built into torch (`aten::_flash_attention_forward`); tensors [1, rows, heads, D]."""

    name = "aten_flash"
    capabilities = replace(ON_CUDA, problem=flash2_problem)

    def _calls(self, band: Band) -> list[Band]:
        return window_calls(band)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[None],
            k[None],
            v[None],
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            band.is_causal,
            False,
            **_aten_flash_options(q, band),
        )
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        # The dropout state is empty because there is no dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        results = torch.ops.aten._flash_attention_backward(
            grads.dout.contiguous()[None],
            q[None],
            k[None],
            v[None],
            grads.out[None],
            grads.lse.transpose(0, 1).contiguous()[None],
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            band.is_causal,
            state,
            unused,
            **_aten_flash_options(q, band),
        )
        return TileResult(*(grad[0] for grad in results))


def _cudnn_problem(request: KernelRequest) -> str | None:
    if request.compute_capability is None:  # no GPU to ask
        return None
    cudnn: Any = torch.backends.cudnn  # its functions have no types
    version = cudnn.version() if cudnn.is_available() else None
    if version is None or version < _CUDNN_VERSION:
        return f"needs cuDNN {_CUDNN_VERSION} or newer, torch has {version or 'none'}"
    return None


class AtenCudnnKernel(LibraryKernel):
    """cuDNN attention (`aten::_scaled_dot_product_cudnn_attention`); tensors [1, heads, rows, D], lse [1, H, rows,
    1].

    Its fast backward adds up dq in any order; its deterministic one has a workspace that is quadratic in the rows, and
    torch's operator does not ask for it. It has no single key (check_cudnn_tensor_shapes of torch).
    """

    name = "aten_cudnn"
    capabilities = replace(
        ON_CUDA,
        max_head_dim=128,
        deterministic="never",
        plans_shapes=True,
        problem=_cudnn_problem,
    )

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        if not _is_for_cudnn(band):
            return AtenFlashKernel().forward(q, k, v, band)
        views = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*views, None, True, 0.0, band.is_causal)
        lse = lse.reshape(lse.shape[1], -1)  # [H, rows], with or without a last dimension of 1
        return out[0].transpose(0, 1), lse.transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        if not _is_for_cudnn(band):
            return AtenFlashKernel().backward(grads, q, k, v, band)
        # dout and out must have the same strides.
        views = [x.transpose(0, 1)[None] for x in (grads.dout.contiguous(), q, k, v, grads.out.contiguous())]
        lse = grads.lse.transpose(0, 1).contiguous()[None, ..., None]
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout: there is none
        results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *views, lse, state, state, None, None, None, q.shape[0], k.shape[0], 0.0, band.is_causal
        )
        return TileResult(*(grad[0].transpose(0, 1) for grad in results))


def _is_for_cudnn(band: Band) -> bool:
    return band.kind != "band" and band.num_keys > 1


def _aten_flash_options(q: Tensor, band: Band) -> dict[str, Any]:
    """Return the keyword arguments of both directions of torch's FlashAttention operators."""
    window = window_of(band)
    return {"scale": q.shape[-1] ** -0.5, "window_size_left": window.left, "window_size_right": window.right}
