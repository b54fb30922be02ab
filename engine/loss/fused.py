"""LM head and cross entropy in one: the logits of a chunk of rows exist, those of the sequence never do.

The gradient of a summed loss with respect to a chunk's logits, softmax - onehot, is known as soon as the logits are.
So the forward pass also makes both gradients, chunk by chunk with three matmuls, and the backward pass only multiplies
them by the incoming scalar: no logits are kept and none are computed twice. Extra memory is, for chunks of C rows,

    C * V            logits of one chunk, later their gradient (compute dtype)
    V * d            gradient of the weight (fp32; + one in the compute dtype on a CPU)
    2 blocks         fp32 softmax, of a size fixed in engine.row_blocks; none on a GPU (engine.kernels)

independent of the number of rows, plus the gradient of `hidden` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.dispatch import uses_triton
from engine.loss.options import LossOptions, check_shapes
from engine.row_blocks import (
    accumulate_dtype,
    acts_as_accelerator,
    rehearses_accelerator,
    row_blocks,
    scaled,
    spans,
)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, options: LossOptions) -> Tensor:
    """Sum over counted rows of -log softmax(hidden @ weight.T)[label] + z_loss * lse**2; fp32 scalar.

    hidden [T, d], weight [V, d], labels [T] int64. Matmuls run in the dtype of `hidden`, softmax and sums in fp32
    (float64 for float64). Where no gradient is wanted (evaluation, frozen inputs) none is computed. The host never
    waits for the device.
    """
    return summed_loss(hidden, weight, labels, partial(_walk_chunks, options=options))


@dataclass
class Gradients:
    """Where the gradients of the loss sum go: hidden [T, d] in its dtype, weight [V, d] fp32; None where not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None

    @property
    def are_wanted(self) -> bool:
        """Whether either is."""
        return self.hidden is not None or self.weight is not None


# (hidden, weight in its dtype, labels, gradients to fill) -> loss sum, float64 scalar; one pass over the chunks.
Walk = Callable[[Tensor, Tensor, Tensor, Gradients], Tensor]


def summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor, walk: Walk) -> Tensor:
    """What `walk` gives, fp32 scalar (float64 for float64), with the gradients that it made on its way."""
    check_shapes(hidden, weight, labels)
    if not torch.is_grad_enabled():
        loss = walk(hidden.detach(), weight.detach().to(hidden.dtype), labels, Gradients())
        return loss.to(accumulate_dtype(hidden.dtype))
    with_graph: Tensor = _SummedLoss.apply(hidden, weight, labels, walk)  # type: ignore[no-untyped-call]
    return with_graph


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, walk: Walk) -> Tensor:
        """The loss sum; both gradients are saved."""
        wide = accumulate_dtype(hidden.dtype)
        gradients = Gradients(
            hidden=torch.empty_like(hidden) if ctx.needs_input_grad[0] else None,
            weight=torch.zeros(weight.shape, dtype=wide, device=weight.device) if ctx.needs_input_grad[1] else None,
        )
        loss = walk(hidden.detach(), weight.detach().to(hidden.dtype), labels, gradients)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight.dtype
        return loss.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The saved gradients times `dloss`, as new tensors: a retained graph may come here again.

        Always multiplied: to look whether the scalar is 1 would make the host wait for the device.
        """
        dhidden, dweight = ctx.saved_tensors
        return (
            None if dhidden is None else scaled(dhidden, dloss, dhidden.dtype),
            None if dweight is None else scaled(dweight, dloss, ctx.weight_dtype),
            None,
            None,
        )


def _walk_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, gradients: Gradients, *, options: LossOptions
) -> Tensor:
    """See `Walk`."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    chunk_rows = min(options.chunk_tokens, hidden.shape[0])
    buffer = torch.empty(chunk_rows, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    scratch: Tensor | None = None
    for rows in spans(hidden.shape[0], options.chunk_tokens):
        chunk = hidden[rows]
        logits = torch.mm(chunk, weight.t(), out=buffer[: chunk.shape[0]])
        total += loss_of_logits(logits, labels[rows], options, overwrite=gradients.are_wanted)
        if gradients.hidden is not None:
            torch.mm(logits, weight, out=gradients.hidden[rows])
        if gradients.weight is not None:
            scratch = add_weight_gradient(gradients.weight, logits, chunk, scratch)
    return total


def loss_of_logits(logits: Tensor, labels: Tensor, options: LossOptions, *, overwrite: bool) -> Tensor:
    """The loss sum of a chunk, float64 scalar; with `overwrite`, `logits` [C, V] become their own gradient.

    On a GPU a kernel reads the logits once for the loss, and once more to overwrite them. On a CPU
    lse is not formed from a sum of exponentials but from the softmax itself, max(logits) - log(max(softmax)): equally
    exact, since the largest probability is at least 1 / V, and torch's softmax is far faster than its logsumexp.
    """
    wide = accumulate_dtype(logits.dtype)
    if uses_triton(logits):
        from engine.kernels import cross_entropy as kernels

        return kernels.losses(logits, labels, options, overwrite=overwrite).sum(dtype=torch.float64)
    if rehearses_accelerator():  # of that kernel
        return torch.empty(logits.shape[0], dtype=wide, device=logits.device).sum(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for rows in row_blocks(logits.shape[0], logits.shape[1], logits.device):
        values = logits[rows].to(wide)
        counted = labels[rows] != options.ignore_index
        index = labels[rows].masked_fill(~counted, 0).unsqueeze(1)
        probabilities = torch.softmax(values, dim=-1)
        lse = values.amax(dim=-1) - probabilities.amax(dim=-1).log_()
        losses = lse - values.gather(1, index).squeeze(1)
        if options.z_loss:
            losses = losses + options.z_loss * lse.square()
        total += losses.masked_fill_(~counted, 0.0).sum(dtype=torch.float64)
        if overwrite:
            # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
            factor = (1.0 + 2.0 * options.z_loss * lse) * counted
            probabilities.mul_(factor.unsqueeze(1))
            probabilities.scatter_add_(1, index, -counted.to(wide).unsqueeze(1))
            logits[rows].copy_(probabilities)
    return total


def add_weight_gradient(total: Tensor, dlogits: Tensor, hidden: Tensor, scratch: Tensor | None) -> Tensor | None:
    """Adds dlogits.T @ hidden to `total` [V, d] in its dtype; returns the scratch buffer to pass again next time."""
    if dlogits.dtype == total.dtype:
        torch.addmm(total, dlogits.t(), hidden, out=total)  # FlopCounterMode does not know addmm_
        return None
    if acts_as_accelerator(dlogits.device):
        # The library's product adds to `total` as it is written: no product of its own in memory.
        torch.addmm(total, dlogits.t(), hidden, out_dtype=total.dtype, out=total)
        return None
    # The CPU has no bf16 matmul with an fp32 result: each chunk's product is rounded once, the sum never.
    scratch = torch.empty(total.shape, dtype=dlogits.dtype, device=total.device) if scratch is None else scratch
    torch.mm(dlogits.t(), hidden, out=scratch)
    for rows in row_blocks(total.shape[0], total.shape[1], total.device):
        total[rows] += scratch[rows].to(total.dtype)
    return scratch
