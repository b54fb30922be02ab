"""Tiles too large for one call of a kernel, head by head: attention's heads have nothing to do with each other.

A call takes memory for itself: FlashAttention-2 in backward 4 bytes for every element of q, and 4 for every element of
k and v as if they had the heads of q. Parts of the heads bound that at no cost that counts: what they copy grows with
the length, what they compute with its square.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from engine.planning.program.ops import HeadPart


class HeadSlices(NamedTuple):
    """Query heads and the kv heads that they use."""

    queries: slice
    keys: slice


# On a GPU: 1 GiB of q in bf16, 128K rows of 32 heads of 128. A part of longer tiles still has thousands of blocks of
# queries for its multiprocessors. Below 2^31, where offsets inside kernels, partly 32-bit, would overflow.
CUDA_CALL_ELEMENTS = 1 << 29


def head_slices(part: HeadPart, q: Tensor, v: Tensor) -> HeadSlices:
    """A part of the heads of q [nq, H, qk_dim] and v [nk, K, v_dim]."""
    num_heads, num_kv_heads = q.shape[1], v.shape[1]
    return HeadSlices(slice(*part.queries(num_heads)), slice(*part.keys(num_heads, num_kv_heads)))


def call_elements(q: Tensor, v: Tensor) -> int:
    """Elements of the largest operand of a call of q [nq, H, qk_dim] and v [nk, K, v_dim], per query head."""
    return max(q.shape[0], v.shape[0]) * max(q.shape[2], v.shape[2])


def split_heads(q: Tensor, v: Tensor, max_elements: int) -> list[HeadSlices]:
    """As few parts of the heads as keep every tensor of a call at `max_elements` or below.

    Parts hold whole groups of query heads with their kv head; a group that is too large by itself is cut, and then
    several parts share a kv head. A single head is never cut (2^29 elements are 4M rows of 128). Keys count with the
    query heads: backward kernels hold dk and dv once per query head before they sum them over a group.
    """
    num_kv_heads, group = v.shape[1], q.shape[1] // v.shape[1]
    head_limit = max(1, max_elements // call_elements(q, v))
    if head_limit < group:
        cuts = [(first, min(first + head_limit, group)) for first in range(0, group, head_limit)]
        return [
            HeadSlices(slice(kv * group + first, kv * group + last), slice(kv, kv + 1))
            for kv, (first, last) in itertools.product(range(num_kv_heads), cuts)
        ]
    step = head_limit // group
    starts = [(first, min(first + step, num_kv_heads)) for first in range(0, num_kv_heads, step)]
    return [HeadSlices(slice(first * group, last * group), slice(first, last)) for first, last in starts]
