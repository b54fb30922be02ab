"""CUDA kernels from libraries: torch's FlashAttention-2 and cuDNN ops, and the flash-attn package.

All take the global lse and a surrogate out in backward and have grouped heads natively. They are used for full and for
square causal tiles, where top-left and bottom-right causal alignment agree.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from engine.attention.kernels.base import BandSpec, Capabilities, TileGradients, TileResult

_CUDA = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    any_band=False,
    max_head_dim=256,
)


class AtenFlashKernel:
    """FlashAttention-2 as built into torch (`aten::_flash_attention_forward`); tensors [1, rows, heads, D]."""

    name = "aten_flash"
    capabilities = _CUDA

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of a full or square causal tile."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, q.shape[0], k.shape[0], 0.0, band.is_causal, False
        )
        return out[0], lse[0].transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv); the dropout state is empty because there is no dropout."""
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
        )
        return TileResult(*(grad[0] for grad in results))


class AtenCudnnKernel:
    """cuDNN attention (`aten::_scaled_dot_product_cudnn_attention`); tensors [1, heads, rows, D], lse [1, H, rows,
    1].
    """

    name = "aten_cudnn"
    capabilities = Capabilities(_CUDA.devices, _CUDA.dtypes, any_band=False, max_head_dim=128)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of a full or square causal tile."""
        views = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*views, None, True, 0.0, band.is_causal)
        lse = lse.reshape(lse.shape[1], -1)  # [H, rows], with or without a last dimension of 1
        return out[0].transpose(0, 1), lse.transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv); the philox state is empty because there is no dropout."""
        views = [x.transpose(0, 1)[None] for x in (grads.dout, q, k, v, grads.out)]
        lse = grads.lse.transpose(0, 1).contiguous()[None, ..., None]
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *views, lse, state, state, None, None, None, q.shape[0], k.shape[0], 0.0, band.is_causal
        )
        return TileResult(*(grad[0].transpose(0, 1) for grad in results))


class FlashAttnKernel:
    """The flash-attn package (FlashAttention-2); tensors [1, rows, heads, D], lse [1, H, rows]."""

    name = "flash_attn"
    capabilities = _CUDA

    @staticmethod
    def is_installed() -> bool:
        """Whether the package can be imported."""
        return importlib.util.find_spec("flash_attn") is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of a full or square causal tile."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q[None],
            k[None],
            v[None],
            **_flash_attn_options(q, band),
            return_softmax=False,
        )
        return out[0], lse[0].transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv), written into buffers of our own."""
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
            **_flash_attn_options(q, band),
            deterministic=False,
        )
        return TileResult(dq, dk, dv)


def _flash_attn_options(q: Tensor, band: BandSpec) -> dict[str, Any]:
    """What both directions of the flash-attn package are told: no dropout, window, soft cap or ALiBi."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": band.is_causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
