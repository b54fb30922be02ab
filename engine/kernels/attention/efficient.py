"""torch's memory-efficient CUDA attention (`aten::_efficient_attention_forward`): fp32, and GPUs older than Ampere."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.attention.base import (
    ON_CUDA,
    LibraryKernel,
    TileGradients,
    TileResult,
)
from engine.kernels.attention.reference import band_bias
from engine.planning.visibility.mask import Band, row_strips

STRIP_ROWS = 512  # of queries whose bias exists at once
_ALIGNED_ROWS = 32  # the operator's lse has a multiple of them, the rest +inf
_ALIGNED_KEYS = 16  # elements between the rows of a bias
_NO_MASK, _CAUSAL_FROM_TOP_LEFT = 0, 1  # the operator's custom_mask_type


class AtenEfficientKernel(LibraryKernel):
    """Tensors [1, rows, heads, D], lse [1, H, rows rounded to 32]; grouped keys and values are expanded.

    It has a causal flag and an additive bias. General bands are cut into strips of queries with the keys that these
    see, so that a bias stays small. fp32 products use three TF32 ones from Ampere on, which is fp32 but for the last
    bits.
    """

    name = "aten_efficient"
    capabilities = replace(
        ON_CUDA,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        compute_capabilities=((5, 0), None),
        bfloat16_from=(8, 0),
        unequal_head_dims=True,
    )

    def _calls(self, band: Band) -> list[Band]:
        return row_strips(band, STRIP_ROWS)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None],
            _expanded(k, group),
            _expanded(v, group),
            _bias(q, band),
            None,
            None,
            None,
            None,
            0.0,
            _mask_type(band),
            True,
        )
        return out[0], lse[0, :, : q.shape[0]].transpose(0, 1)

    def _backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        rows, num_heads = grads.lse.shape
        group = num_heads // k.shape[1]
        lse = torch.full(
            (1, num_heads, -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS), math.inf, dtype=torch.float32, device=q.device
        )
        lse[0, :, :rows] = grads.lse.transpose(0, 1)
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout: there is none
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            grads.dout.contiguous()[None],
            q[None],
            _expanded(k, group),
            _expanded(v, group),
            _bias(q, band),
            grads.out.contiguous()[None],
            None,
            None,
            rows,
            k.shape[0],
            lse,
            0.0,
            state,
            state,
            _mask_type(band),
            False,
        )
        return TileResult(dq[0], *(_summed(x[0], k.shape[1]) for x in (dk, dv)))


def _expanded(x: Tensor, group: int) -> Tensor:
    """[1, rows, H, D] of keys or values [rows, K, D]; a copy unless K is H."""
    return x[None] if group == 1 else x.repeat_interleave(group, dim=1)[None]


def _summed(x: Tensor, num_kv_heads: int) -> Tensor:
    """[rows, K, D], in fp32 if several were summed, of gradients [rows, H, D] of expanded keys or values."""
    if x.shape[1] == num_kv_heads:
        return x
    grouped = x.view(x.shape[0], num_kv_heads, -1, x.shape[2])
    return grouped.sum(dim=2, dtype=torch.float32)


def _mask_type(band: Band) -> int:
    return _CAUSAL_FROM_TOP_LEFT if band.is_causal else _NO_MASK


def _bias(q: Tensor, band: Band) -> Tensor | None:
    """[1, H, num_queries, num_keys], the same for all heads, its rows aligned; None where the flag says it."""
    if band.kind != "band":
        return None
    rows, keys = band.num_queries, band.num_keys
    bias = torch.empty(rows, -(-keys // _ALIGNED_KEYS) * _ALIGNED_KEYS, dtype=q.dtype, device=q.device)[:, :keys]
    bias.copy_(band_bias(band, q.dtype, q.device))
    return bias.expand(1, q.shape[1], rows, keys)
