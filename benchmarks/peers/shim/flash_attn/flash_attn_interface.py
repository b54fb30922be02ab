"""flash-attn's forward and backward on CPUs: [batch, rows, heads, head_dim] in and out, lse [batch, heads, rows] fp32.

Causal masks are aligned at the bottom right, as in flash-attn; windows, dropout, ALiBi and soft caps are refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from engine.kernels.attention.base import TileGradients
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.planning.visibility.mask import Band

_KERNEL = CpuFlashKernel()


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, lse, no probabilities, no random state)."""
    _refuse(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    parts = [_forward(*rows, causal=causal) for rows in zip(q, k, v, strict=True)]
    out = torch.stack([part[0] for part in parts])
    lse = torch.stack([part[1].transpose(0, 1) for part in parts])
    return out, lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv."""
    _refuse(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    for b in range(q.shape[0]):
        rows = TileGradients(dout[b], out[b], softmax_lse[b].transpose(0, 1))
        for target, grad in zip((dq, dk, dv), _backward(rows, q[b], k[b], v[b], causal=causal), strict=True):
            target[b].copy_(grad)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, None]:
    """(out [total rows, heads, D], lse [heads, total rows], no probabilities, no random state) of packed sequences."""
    _refuse(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    parts = [_forward(q[a], k[b], v[b], causal=causal) for a, b in _documents(cu_seqlens_q, cu_seqlens_k)]
    out, lse = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    return out, lse.transpose(0, 1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv of packed sequences."""
    _refuse(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    for a, b in _documents(cu_seqlens_q, cu_seqlens_k):
        rows = TileGradients(dout[a], out[a], softmax_lse[:, a].transpose(0, 1))
        grads = _backward(rows, q[a], k[b], v[b], causal=causal)
        for target, grad in zip((dq[a], dk[b], dv[b]), grads, strict=True):
            target.copy_(grad)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """out, differentiable."""
    if return_attn_probs:
        raise NotImplementedError("this stand-in returns no probabilities")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    _refuse(q, dropout_p, scale, window_size, softcap, alibi_slopes)
    out: Tensor = _FlashAttention.apply(q, k, v, causal)
    return out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        options = (0.0, q.shape[-1] ** -0.5, ctx.causal, -1, -1, 0.0, None, False)
        _flash_attn_backward(grad_outputs[0], q, k, v, out, lse, dq, dk, dv, *options)
        return dq, dk, dv, None


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [rows, heads, D] in q's dtype, lse [rows, heads]) of one sequence."""
    if not causal:
        return _KERNEL.forward(q, k, v, _full(q, k))
    before = _keys_before(q, k)
    out, lse = _KERNEL.forward(q, k[before:], v[before:], _full(q, q)._replace(low=0))
    if before == 0:
        return out, lse
    earlier_out, earlier_lse = _KERNEL.forward(q, k[:before], v[:before], _full(q, k[:before]))
    weight = torch.sigmoid(earlier_lse - lse)[..., None]
    merged = torch.lerp(out.to(lse.dtype), earlier_out.to(lse.dtype), weight).to(q.dtype)
    return merged, torch.logaddexp(lse, earlier_lse)


def _full(q: Tensor, k: Tensor) -> Band:
    return Band(0, q.shape[0], 0, k.shape[0])


def _backward(rows: TileGradients, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one sequence."""
    if not causal:
        return tuple(_KERNEL.backward(rows, q, k, v, _full(q, k)))
    before = _keys_before(q, k)
    square = _KERNEL.backward(rows, q, k[before:], v[before:], _full(q, q)._replace(low=0))
    if before == 0:
        return tuple(square)
    earlier = _KERNEL.backward(rows, q, k[:before], v[:before], _full(q, k[:before]))
    dk, dv = (torch.cat(parts) for parts in zip(earlier[1:], square[1:], strict=True))
    return square.dq.to(rows.lse.dtype) + earlier.dq, dk, dv


def _keys_before(q: Tensor, k: Tensor) -> int:
    """Keys that every query sees when the mask is aligned at the bottom right."""
    before = k.shape[0] - q.shape[0]
    if before < 0:
        raise NotImplementedError(f"causal with {q.shape[0]} queries but {k.shape[0]} keys")
    return before


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Rows of queries and of keys of every packed sequence."""
    bounds = (tensor.tolist() for tensor in (cu_seqlens_q, cu_seqlens_k))
    queries, keys = ([slice(a, b) for a, b in itertools.pairwise(ends)] for ends in bounds)
    return list(zip(queries, keys, strict=True))


def _refuse(q: Tensor, dropout_p: float, scale: float, window: Any, softcap: float, alibi_slopes: Any) -> None:
    """Raise NotImplementedError for what this stand-in does not do."""
    if abs(scale - q.shape[-1] ** -0.5) > 1e-9 or dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("this stand-in knows the usual softmax scale, no dropout, soft cap or ALiBi")
    if tuple(window) not in ((-1, -1), (None, None)):
        raise NotImplementedError(f"this stand-in knows no windows, got {window}")
