"""A linear layer that can skip its matmul and still have correct gradients, for recomputation in backward.

The gradients of y = x W^T are dx = dy W and dW = dy^T x; y itself is not needed. A recomputed layer needs the values in
its middle, but not the result of its last matmul, nor q, k and v once attention's results are there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    """nn.Linear whose forward can skip the matmul."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor, values: bool = True) -> Tensor:
        """Return x W^T + b, [..., out_features]; with `values` False uninitialised memory with correct gradients."""
        return linear(x, self.weight, self.bias, values=values)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, values: bool = True) -> Tensor:
    """Return x [..., in] times weight [out, in] plus bias [out]; `values` as in `Linear.forward`."""
    if values:
        return F.linear(x, weight, bias)
    out: Tensor = _GradientsOnly.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out.add_(bias)


class _GradientsOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return uninitialised memory [..., out]; saves x and weight."""
        ctx.save_for_backward(x, weight)
        return torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return dx [..., in] and dweight [out, in] by the matmuls of F.linear's backward, in its order."""
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = torch.mm(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return dx, dweight
