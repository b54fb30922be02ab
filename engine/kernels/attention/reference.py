"""Plain float64 attention of a tile: the oracle, for any device, dtype and band; quadratic memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.device.row_blocks import accumulate_dtype
from engine.kernels.attention.base import Capabilities, TileGradients, TileResult
from engine.planning.visibility.mask import Band


class ReferenceKernel:
    """Textbook softmax attention in float64, results in the inputs' dtype."""

    name = "reference"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_dim=1 << 16,
        unequal_head_dims=True,
    )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """(out, lse): softmax(q k^T / sqrt(qk_dim)) v and the log of the softmax's denominator."""
        scores = _scores(q, k, band)
        lse = torch.logsumexp(scores, dim=-1)  # [K, g, nq]
        out = torch.einsum("kgij,jkd->ikgd", torch.exp(scores - lse[..., None]), v.double())
        return out.flatten(1, 2).to(q.dtype), _merge_heads(lse).to(accumulate_dtype(q.dtype))

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """Gradients from p = exp(s - lse), ds = p * (dout v^T - rowsum(dout * out))."""
        group = q.shape[1] // k.shape[1]
        scale = 1 / math.sqrt(q.shape[-1])
        lse = _split_heads(grads.lse.double()[..., None], group)[..., 0]  # [nq, K, g]
        dout = _split_heads(grads.dout.double(), group)
        delta = (dout * _split_heads(grads.out.double(), group)).sum(-1)
        p = torch.exp(_scores(q, k, band) - lse.permute(1, 2, 0)[..., None])
        dp = torch.einsum("ikgd,jkd->kgij", dout, v.double())
        ds = p * (dp - delta.permute(1, 2, 0)[..., None]) * scale
        dq = torch.einsum("kgij,jkd->ikgd", ds, k.double()).reshape(q.shape)
        dk = torch.einsum("kgij,ikgd->jkd", ds, _split_heads(q.double(), group))
        dv = torch.einsum("kgij,ikgd->jkd", p, dout)
        return TileResult(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _split_heads(x: Tensor, group: int) -> Tensor:
    """[n, H, D] -> [n, K, g, D]: query head h belongs to kv head h // g."""
    return x.reshape(x.shape[0], x.shape[1] // group, group, x.shape[2])


def _merge_heads(x: Tensor) -> Tensor:
    """[K, g, n] -> [n, H]."""
    return x.flatten(0, 1).transpose(0, 1).contiguous()


def _scores(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """Masked scores [K, g, nq, nk] in float64."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ikgd,jkd->kgij", _split_heads(q.double(), group), k.double()) / math.sqrt(q.shape[-1])
    return scores if band.is_full else scores + band_bias(band, torch.float64, q.device)


def band_bias(band: Band, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [num_queries, num_keys]: 0 where visible, -inf elsewhere."""
    queries, keys = (torch.arange(count, device=device) for count in (band.num_queries, band.num_keys))
    difference = queries[:, None] - keys
    hidden = (difference < band.low) | (difference > band.high)
    return torch.zeros(difference.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
