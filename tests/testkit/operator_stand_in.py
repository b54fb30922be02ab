"""Torch's CUDA attention operators on a CPU: what they are given and give, with the conventions of each.

Written from the operators' contracts (names of the schemas; layouts, alignment, log-sum-exp) and dense attention, for
the kernels that call them: a wrong order of arguments, a wrong transpose or a wrong alignment gives wrong numbers here.
Arguments have the names that the schema of this version of torch gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

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
    return [ds @ wide_k, *(x.view(k.shape[0], group, *x.shape[1:]).sum(1) for x in (dk, dv))]


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


def flash_forward(given: Any) -> tuple[Tensor, ...]:
    check_flash(given)
    assert not given.return_debug_mask
    q, k, v = bhsd(given.query, given.key, given.value)
    out, lse = attention(q, k, v, flash_bias(given))
    state = torch.zeros(2, dtype=torch.uint64)
    return out.transpose(0, 1)[None].to(given.query.dtype), lse[None].float(), state, state, torch.empty(0)


def flash_backward(given: Any) -> tuple[Tensor, ...]:
    check_flash(given)
    assert given.rng_state.dtype == given.unused.dtype == torch.uint64
    assert given.logsumexp.is_contiguous()
    assert given.logsumexp.dtype == torch.float32
    assert given.logsumexp.shape == (1, given.query.shape[2], given.max_q)
    tensors = bhsd(given.grad_out, given.query, given.key, given.value, given.out)
    found = gradients(*tensors, given.logsumexp[0], flash_bias(given))
    return tuple(x.transpose(0, 1)[None].to(given.query.dtype).contiguous() for x in found)


def check_flash(given: Any) -> None:
    assert given.cum_seq_q is None
    assert given.cum_seq_k is None
    assert given.dropout_p == 0.0
    assert given.max_q == given.query.shape[1]
    assert given.max_k == given.key.shape[1]
    assert given.scale == given.query.shape[-1] ** -0.5
    assert None not in (given.window_size_left, given.window_size_right)


def flash_bias(given: Any) -> Tensor:
    return window_bias(given.max_q, given.max_k, given.is_causal, given.window_size_left, given.window_size_right)


def cudnn_forward(given: Any) -> tuple[object, ...]:
    assert given.attn_bias is None
    assert given.scale is None
    assert given.dropout_p == 0.0
    assert given.compute_log_sumexp
    assert not given.return_debug_mask
    rows, keys = given.query.shape[2], given.key.shape[2]
    assert keys > 1
    bias = top_left_bias(rows, keys, given.is_causal)
    out, lse = attention(given.query[0], given.key[0], given.value[0], bias)
    empty = torch.empty(0)
    return out[None].to(given.query.dtype), lse[None, ..., None].float(), empty, empty, rows, keys, empty, empty, empty


def cudnn_backward(given: Any) -> tuple[Tensor, ...]:
    assert given.attn_bias is None
    assert given.scale is None
    assert given.dropout_p == 0.0
    assert given.cum_seq_q is None
    assert given.cum_seq_k is None
    assert given.max_q == given.query.shape[2]
    assert given.max_k == given.key.shape[2]
    assert given.philox_seed.dtype == given.philox_offset.dtype == torch.int64
    assert given.logsumexp.shape == (*given.query.shape[:3], 1)
    assert given.logsumexp.dtype == torch.float32
    strides = [
        [s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1] for x in (given.grad_out, given.out)
    ]
    assert strides[0] == strides[1]
    bias = top_left_bias(given.max_q, given.max_k, given.is_causal)
    tensors = [x[0] for x in (given.grad_out, given.query, given.key, given.value, given.out)]
    found = gradients(*tensors, given.logsumexp[0, ..., 0], bias)
    return tuple(x[None].to(given.query.dtype) for x in found)


def efficient_forward(given: Any) -> tuple[object, ...]:
    check_efficient(given)
    assert given.max_seqlen_q is None
    assert given.max_seqlen_k is None
    assert given.compute_log_sumexp
    query, rows = given.query, given.query.shape[1]
    out, lse = attention(*bhsd(query, given.key, given.value), efficient_bias(given))
    padded = torch.full((1, query.shape[2], -(-rows // 32) * 32), math.inf)
    padded[0, :, :rows] = lse
    state = torch.zeros((), dtype=torch.int64)
    return out.transpose(0, 1)[None].to(query.dtype), padded, state, state, rows, given.key.shape[1]


def efficient_backward(given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, rows = given.query, given.query.shape[1]
    check_efficient(given)
    assert not given.bias_requires_grad
    assert given.max_seqlen_q == rows
    assert given.max_seqlen_k == given.key.shape[1]
    assert given.philox_seed.dtype == given.philox_offset.dtype == torch.int64
    assert given.out.is_contiguous()
    assert given.logsumexp.shape == (1, query.shape[2], -(-rows // 32) * 32)
    assert given.logsumexp.is_contiguous()
    assert (given.logsumexp[..., rows:] == math.inf).all()
    tensors = bhsd(given.grad_out_, query, given.key, given.value, given.out)
    found = gradients(*tensors, given.logsumexp[0, :, :rows], efficient_bias(given))
    dq, dk, dv = (x.transpose(0, 1)[None].to(query.dtype).contiguous() for x in found)
    return dq, dk, dv, torch.empty(0)


def check_efficient(given: Any) -> None:
    assert given.cu_seqlens_q is None
    assert given.cu_seqlens_k is None
    assert given.scale is None
    assert given.dropout_p == 0.0
    assert given.query.shape[2] == given.key.shape[2], "this operator has no grouped heads"


def efficient_bias(given: Any) -> Tensor:
    rows, keys = given.query.shape[1], given.key.shape[1]
    causal = top_left_bias(rows, keys, {0: False, 1: True}[given.custom_mask_type])
    if given.bias is None:
        return causal
    assert given.bias.shape == (1, given.query.shape[2], rows, keys)
    assert given.bias.dtype == given.query.dtype
    assert given.bias.stride(-1) == 1
    assert given.bias.stride(-2) % 16 == 0
    return causal + given.bias[0]


OPERATORS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
}


def with_names(name: str, function: Callable[[Any], object]) -> Callable[..., object]:
    """An operator of torch that gives `function` its arguments by name, those left out with their defaults."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def operator(*args: object, **kwargs: object) -> object:
        by_position = zip((argument.name for argument in arguments), args, strict=False)
        return function(SimpleNamespace(**{**defaults, **dict(by_position), **kwargs}))

    return operator


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside the body the operators take CPU tensors."""
    library = Library("aten", "IMPL", "CPU")
    try:
        for name, function in OPERATORS.items():
            library.impl(name, with_names(name, function))
        yield
    finally:
        library._destroy()
