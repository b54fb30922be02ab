"""Torch's CUDA attention operators on a CPU: what they are given and give, with the conventions of each.

Written from the operators' contracts (names of the schemas; layouts, alignment, log-sum-exp) and dense attention, for
the kernels that call them: a wrong order of arguments, a wrong transpose or a wrong alignment gives wrong numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library  # registers stand-ins for operators that torch has for GPUs only


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [H, n, D], k and v [K, m, D], bias [n, m] or [H, n, m]: softmax by the book in float64."""
    k, v = (x.double().repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1]) + bias.double()
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor) -> list[Tensor]:
    """(dq, dk, dv) from a given lse [H, n] and rowsum(dout * out)."""
    group, scale = q.shape[0] // k.shape[0], 1 / math.sqrt(q.shape[-1])
    wide_k, wide_v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    p = torch.exp(q.double() @ wide_k.mT * scale + bias.double() - lse.double()[..., None])
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (dout.double() @ wide_v.mT - delta) * scale
    dk, dv = ds.mT @ q.double(), p.mT @ dout.double()
    return [ds @ wide_k, *(x.view(k.shape[0], group, *k.shape[1:]).sum(1) for x in (dk, dv))]


def window_bias(n: int, m: int, causal: bool, left: int, right: int) -> Tensor:
    """FlashAttention-2's: everything counts from the bottom right corner; -1 means no bound, and so do m and more;
    no bound beside another one means m.
    """
    left, right = (-1 if bound >= m else bound for bound in (left, right))
    if not causal and left < 0 <= right:
        left = m
    if not causal and right < 0 <= left:
        right = m
    distance = torch.arange(n)[:, None] + (m - n) - torch.arange(m)[None]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        assert right in (-1, 0)
        right = 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    return torch.zeros(n, m).masked_fill(~seen, -math.inf)


def top_left_bias(n: int, m: int, causal: bool) -> Tensor:
    """cuDNN's and the memory-efficient operator's."""
    return torch.full((n, m), -math.inf).triu(1) if causal else torch.zeros(n, m)


def bhsd(*tensors: Tensor) -> list[Tensor]:
    """[1, rows, heads, D] -> [heads, rows, D]."""
    assert all(x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1 for x in tensors)
    return [x[0].transpose(0, 1) for x in tensors]


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: object,
) -> tuple[Tensor, ...]:
    assert cum_seq_q is None
    assert cum_seq_k is None
    assert (max_q, max_k, dropout_p, return_debug_mask) == (query.shape[1], key.shape[1], 0.0, False)
    assert scale == query.shape[-1] ** -0.5
    assert window_size_left is not None
    assert window_size_right is not None
    q, k, v = bhsd(query, key, value)
    out, lse = attention(q, k, v, window_bias(max_q, max_k, is_causal, window_size_left, window_size_right))
    state = torch.zeros(2, dtype=torch.uint64)
    return out.transpose(0, 1)[None].to(query.dtype), lse[None].float(), state, state, torch.empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    assert cum_seq_q is None
    assert cum_seq_k is None
    assert (max_q, max_k, dropout_p) == (query.shape[1], key.shape[1], 0.0)
    assert scale == query.shape[-1] ** -0.5
    assert rng_state.dtype == unused.dtype == torch.uint64
    assert window_size_left is not None
    assert window_size_right is not None
    assert logsumexp.is_contiguous()
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (1, query.shape[2], max_q)
    bias = window_bias(max_q, max_k, is_causal, window_size_left, window_size_right)
    found = gradients(*bhsd(grad_out, query, key, value, out), logsumexp[0], bias)
    return tuple(x.transpose(0, 1)[None].to(query.dtype).contiguous() for x in found)


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[object, ...]:
    assert attn_bias is None
    assert compute_log_sumexp
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert scale is None
    assert key.shape[2] > 1
    out, lse = attention(query[0], key[0], value[0], top_left_bias(query.shape[2], key.shape[2], is_causal))
    empty = torch.empty(0)
    results = out[None].to(query.dtype), lse[None, ..., None].float()
    return (*results, empty, empty, query.shape[2], key.shape[2], empty, empty, empty)


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert attn_bias is None
    assert cum_seq_q is None
    assert cum_seq_k is None
    assert scale is None
    assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0.0)
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert logsumexp.shape == (*query.shape[:3], 1)
    assert logsumexp.dtype == torch.float32
    assert grad_out.stride() == out.stride()
    bias = top_left_bias(max_q, max_k, is_causal)
    found = gradients(grad_out[0], query[0], key[0], value[0], out[0], logsumexp[0, ..., 0], bias)
    return tuple(x[None].to(query.dtype) for x in found)


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    **unused: object,
) -> tuple[object, ...]:
    assert cu_seqlens_q is None
    assert cu_seqlens_k is None
    assert max_seqlen_q is None
    assert max_seqlen_k is None
    assert dropout_p == 0.0
    assert compute_log_sumexp
    assert scale is None
    rows, keys = query.shape[1], key.shape[1]
    out, lse = attention(*bhsd(query, key, value), efficient_bias(query, key, bias, custom_mask_type))
    padded = torch.full((1, query.shape[2], -(-rows // 32) * 32), math.inf)
    padded[0, :, :rows] = lse
    state = torch.zeros((), dtype=torch.int64)
    return out.transpose(0, 1)[None].to(query.dtype), padded, state, state, rows, keys


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = query.shape[1]
    assert cu_seqlens_q is None
    assert cu_seqlens_k is None
    assert scale is None
    assert not bias_requires_grad
    assert (max_seqlen_q, max_seqlen_k, dropout_p) == (rows, key.shape[1], 0.0)
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert out.is_contiguous()
    assert logsumexp.shape == (1, query.shape[2], -(-rows // 32) * 32)
    assert logsumexp.is_contiguous()
    assert (logsumexp[..., rows:] == math.inf).all()
    mask = efficient_bias(query, key, bias, custom_mask_type)
    found = gradients(*bhsd(grad_out_, query, key, value, out), logsumexp[0, :, :rows], mask)
    dq, dk, dv = (x.transpose(0, 1)[None].to(query.dtype).contiguous() for x in found)
    return dq, dk, dv, torch.empty(0)


def efficient_bias(query: Tensor, key: Tensor, bias: Tensor | None, mask_type: int) -> Tensor:
    assert query.shape[2] == key.shape[2], "this operator has no grouped heads"
    rows, keys = query.shape[1], key.shape[1]
    causal = top_left_bias(rows, keys, {0: False, 1: True}[mask_type])
    if bias is None:
        return causal
    assert bias.shape == (1, query.shape[2], rows, keys)
    assert bias.dtype == query.dtype
    assert bias.stride(-1) == 1
    assert bias.stride(-2) % 16 == 0
    return causal + bias[0]


OPERATORS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside the body the operators take CPU tensors."""
    library = Library("aten", "IMPL", "CPU")
    try:
        for name, function in OPERATORS.items():
            library.impl(name, function)
        yield
    finally:
        library._destroy()
