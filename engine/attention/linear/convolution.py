"""The short causal convolution of linear layers, over sequences that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.linear.sequence import Halo, LinearSequence


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: LinearSequence) -> Tensor:
    """Convolve each channel with its kernel over the rows of its document, on whatever rank they are.

    Before the first row of a document are zeros. Collective over the ranks that share the sequence, backward too: each
    sends the last kernel - 1 rows of its spans to the rank that holds the next rows, and their gradients come back.

    Args:
        x: [B, channels, T], this rank's rows.
        weight: [channels, kernel].
        bias: [channels] or None.
        sequence: `SequenceContext.linear`.

    Returns:
        [B, channels, T], in the dtype of x.
    """
    sequence.calls += 1
    channels, kernel = weight.shape
    halo = sequence.halo(kernel - 1)
    received: Tensor = _Halo.apply(x, halo, sequence)  # type: ignore[no-untyped-call]
    zeros = x.new_zeros(*x.shape[:2], 1)
    columns = torch.cat([x, received, zeros], -1).index_select(-1, halo.columns)
    # [B, channels, columns] -> column i is the result of columns i - kernel + 1 ... i
    out = F.conv1d(F.pad(columns.to(weight.dtype), (kernel - 1, 0)), weight[:, None], bias, groups=channels)
    return out.index_select(-1, halo.results).to(x.dtype)


class _Halo(torch.autograd.Function):
    """Rows of other ranks, [B, channels, received]; backward returns their gradients to the owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, sequence: LinearSequence) -> Tensor:
        ctx.halo, ctx.sequence, ctx.shape = halo, sequence, x.shape
        sends = {peer: x[..., rows].contiguous() for peer, rows in halo.sends.items()}
        receives = {peer: x.new_empty(*x.shape[:2], count) for peer, count in halo.receives.items()}
        sequence.exchange(sends, receives)
        return torch.cat([x.new_empty(*x.shape[:2], 0), *receives.values()], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (dreceived,) = grad_outputs
        halo: Halo = ctx.halo
        parts: Sequence[Tensor] = torch.split(dreceived, list(halo.receives.values()), -1)
        sends = {peer: part.contiguous() for peer, part in zip(halo.receives, parts, strict=True)}
        receives = {peer: dreceived.new_empty(*ctx.shape[:2], len(rows)) for peer, rows in halo.sends.items()}
        ctx.sequence.exchange(sends, receives)
        dx = dreceived.new_zeros(ctx.shape)
        for peer, rows in halo.sends.items():
            dx.index_add_(-1, rows, receives[peer])
        return dx, None, None
