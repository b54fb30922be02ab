"""CUDA kernels from libraries: torch's FlashAttention-2 and cuDNN ops, and the flash-attn package.

All take the global lse and a surrogate out in backward and have grouped heads natively. Causal tiles are square, where
top-left and bottom-right alignment agree; general bands become FlashAttention's windows, which count from the bottom
right. cuDNN has no windows here, so its kernel hands such tiles to FlashAttention.

Offsets inside these kernels are partly 32-bit: a tile of which a tensor has 2^31 elements or more is computed in parts
of its heads, each copied to memory of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.kernels.base import BandSpec, Capabilities, TileGradients, TileResult

_CUDA = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    max_head_dim=256,
)


MAX_ELEMENTS = (1 << 31) - 1  # of one tensor in one call


class Window(NamedTuple):
    """Keys that a query sees left and right of its own, aligned at the bottom right corner; -1: all."""

    left: int
    right: int


def window_of(band: BandSpec, num_queries: int, num_keys: int) -> Window:
    """The window that a band (without empty rows or columns) is: i + nk - nq - left <= j <= i + nk - nq + right."""
    if band.is_causal:
        return Window(-1, -1)  # said by the causal flag
    shift = num_keys - num_queries
    window = Window(-1 if band.high is None else band.high + shift, -1 if band.low is None else -shift - band.low)
    assert band.high is None or window.left >= 0, (band, num_queries, num_keys)
    assert band.low is None or window.right >= 0, (band, num_queries, num_keys)
    return window


class HeadSlices(NamedTuple):
    """Query heads and the kv heads that they use."""

    queries: slice
    keys: slice


def split_heads(q: Tensor, k: Tensor, max_elements: int = MAX_ELEMENTS) -> list[HeadSlices]:
    """As few parts of the heads as keep every tensor of a call at `max_elements` or below.

    Parts hold whole groups of query heads with their kv head; a group that is too large by itself is cut, and then
    several parts share a kv head. A single head is never cut (2^31 elements are 16M rows of 128). Keys count with the
    query heads: backward kernels hold dk and dv once per query head before they sum them over a group.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
    head_limit = max(1, max_elements // (max(q.shape[0], k.shape[0]) * head_dim))
    if head_limit < group:
        cuts = [(first, min(first + head_limit, group)) for first in range(0, group, head_limit)]
        return [
            HeadSlices(slice(kv * group + first, kv * group + last), slice(kv, kv + 1))
            for kv, (first, last) in itertools.product(range(num_kv_heads), cuts)
        ]
    step = head_limit // group
    starts = [(first, min(first + step, num_kv_heads)) for first in range(0, num_kv_heads, step)]
    return [HeadSlices(slice(first * group, last * group), slice(first, last)) for first, last in starts]


class _CudaKernel(ABC):
    """A kernel that computes tiles of any size with calls of at most `max_elements` per tensor."""

    def __init__(self, max_elements: int = MAX_ELEMENTS) -> None:
        self._max_elements = max_elements

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile."""
        parts = split_heads(q, k, self._max_elements)
        if len(parts) == 1:
            return self._forward(q, k, v, band)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse: Tensor | None = None
        for part in parts:
            results = self._forward(*_cut(part, q, k, v), band)
            out[:, part.queries] = results[0]
            if lse is None:
                lse = torch.empty(q.shape[:2], dtype=results[1].dtype, device=q.device)
            lse[:, part.queries] = results[1]
        assert lse is not None
        return out, lse

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv); dk and dv in fp32 if parts share kv heads, else in the inputs' dtype."""
        parts = split_heads(q, k, self._max_elements)
        if len(parts) == 1:
            return self._backward(grads, q, k, v, band)
        shared = len(parts) > len({part.keys.start for part in parts})
        wide = torch.promote_types(k.dtype, torch.float32) if shared else k.dtype
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for part in parts:
            part_grads = TileGradients(*(x[:, part.queries].contiguous() for x in grads))
            result = self._backward(part_grads, *_cut(part, q, k, v), band)
            dq[:, part.queries] = result.dq
            dk[:, part.keys] += result.dk
            dv[:, part.keys] += result.dv
        return TileResult(dq, dk, dv)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """One call of the library: (out, lse) of a tile that it can take whole."""

    @abstractmethod
    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """One call of the library: (dq, dk, dv)."""


def _cut(part: HeadSlices, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies: a view's rows would still lie as far apart as those of the whole."""
    return q[:, part.queries].contiguous(), k[:, part.keys].contiguous(), v[:, part.keys].contiguous()


class AtenFlashKernel(_CudaKernel):
    """FlashAttention-2 as built into torch (`aten::_flash_attention_forward`); tensors [1, rows, heads, D]."""

    name = "aten_flash"
    capabilities = _CUDA

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        window = window_of(band, q.shape[0], k.shape[0])
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
            window_size_left=window.left,
            window_size_right=window.right,
        )
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        window = window_of(band, q.shape[0], k.shape[0])
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
            window_size_left=window.left,
            window_size_right=window.right,
        )
        return TileResult(*(grad[0] for grad in results))


class AtenCudnnKernel(_CudaKernel):
    """cuDNN attention (`aten::_scaled_dot_product_cudnn_attention`); tensors [1, heads, rows, D], lse [1, H, rows,
    1].
    """

    name = "aten_cudnn"
    capabilities = Capabilities(_CUDA.devices, _CUDA.dtypes, max_head_dim=128)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        if not (band.is_full or band.is_causal):
            return AtenFlashKernel(self._max_elements)._forward(q, k, v, band)
        views = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*views, None, True, 0.0, band.is_causal)
        lse = lse.reshape(lse.shape[1], -1)  # [H, rows], with or without a last dimension of 1
        return out[0].transpose(0, 1), lse.transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        if not (band.is_full or band.is_causal):
            return AtenFlashKernel(self._max_elements)._backward(grads, q, k, v, band)
        views = [x.transpose(0, 1)[None] for x in (grads.dout, q, k, v, grads.out)]
        lse = grads.lse.transpose(0, 1).contiguous()[None, ..., None]
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout: there is none
        results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *views, lse, state, state, None, None, None, q.shape[0], k.shape[0], 0.0, band.is_causal
        )
        return TileResult(*(grad[0].transpose(0, 1) for grad in results))


class FlashAttnKernel(_CudaKernel):
    """The flash-attn package (FlashAttention-2); tensors [1, rows, heads, D], lse [1, H, rows]."""

    name = "flash_attn"
    capabilities = _CUDA

    @staticmethod
    def is_installed() -> bool:
        """Whether the package can be imported."""
        return importlib.util.find_spec("flash_attn") is not None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q[None],
            k[None],
            v[None],
            **_flash_attn_options(q, k, band),
            return_softmax=False,
        )
        return out[0], lse[0].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_backward(
            grads.dout.contiguous()[None],
            q[None],
            k[None],
            v[None],
            grads.out[None],
            grads.lse.transpose(0, 1).contiguous()[None],
            dq[None],
            dk[None],
            dv[None],
            **_flash_attn_options(q, k, band),
            deterministic=False,
        )
        return TileResult(dq, dk, dv)


def _flash_attn_options(q: Tensor, k: Tensor, band: BandSpec) -> dict[str, Any]:
    """What both directions of the flash-attn package are told: no dropout, soft cap or ALiBi."""
    window = window_of(band, q.shape[0], k.shape[0])
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": band.is_causal,
        "window_size_left": window.left,
        "window_size_right": window.right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
