"""torch's blocked CPU attention (`aten::_scaled_dot_product_flash_attention_for_cpu`), tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels.base import BandSpec, Capabilities, TileGradients, TileResult
from engine.attention.kernels.reference import band_bias

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlashKernel:
    """Online-softmax CPU kernel; takes the global lse and a surrogate out in backward, grouped heads native."""

    name = "cpu_flash"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        any_band=True,
        max_head_dim=1 << 16,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of the tile; the op works on [1, heads, rows, D] views without a copy."""
        out, lse = _FORWARD(
            _heads_first(q), _heads_first(k), _heads_first(v), 0.0, band.is_causal, attn_mask=_bias(q, k, band)
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: BandSpec) -> TileResult:
        """(dq, dk, dv) of the tile; the op forms rowsum(dout * out) itself, so `out` may be a surrogate."""
        results = _BACKWARD(
            _heads_first(grads.dout),
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            _heads_first(grads.out),
            grads.lse.transpose(0, 1)[None],
            0.0,
            band.is_causal,
            attn_mask=_bias(q, k, band),
        )
        return TileResult(*(grad[0].transpose(0, 1) for grad in results))


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, D] -> [1, heads, rows, D] as a view."""
    return x.transpose(0, 1)[None]


def _bias(q: Tensor, k: Tensor, band: BandSpec) -> Tensor | None:
    if band.is_full or band.is_causal:
        return None
    return band_bias(q.shape[0], k.shape[0], band, q.dtype, q.device)[None, None]
