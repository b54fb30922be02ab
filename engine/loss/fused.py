"""LM head and cross entropy in one: the logits of a chunk of rows exist, those of the sequence never do.

The gradient of a summed loss with respect to a chunk's logits, softmax - onehot, is known as soon as the logits are.
So the forward pass also makes both gradients, chunk by chunk with three matmuls, and the backward pass only multiplies
them by the incoming scalar, where they lie: no logits are kept, none are computed twice, and there is one backward pass
for a call. Extra memory is, for chunks of C rows,

    C * V            logits of one chunk, later their gradient (compute dtype); gone before backward
    V * d            gradient of the weight in fp32; backward leaves it in the dtype of the weight, in as much memory
    2 blocks         fp32 softmax, of a size fixed in engine.device.row_blocks; none on a GPU (engine.kernels)

independent of the number of rows, plus the gradient of `hidden` itself.

Ranks may hold slices of the vocabulary, each with its own rows of `hidden`: then no rank has a whole row of logits, and
they walk chunks together:

    gather the chunk's rows from all ranks     hidden [C, d]
    local logits                               [C, V / t]
    gather three numbers per row and rank      maximum, sum of exponentials, logit of the label: lse is exact
    both gradients from the local logits       of the weight's slice; of hidden, summed by a reduce-scatter

torch's loss_parallel wants the logits of all rows at once as a DTensor, keeps them for backward, and knows no z-loss.
Sent per rank, with T the rows of all ranks: 2 (t - 1) / t T d numbers in the dtype of hidden, 3 (t - 1) T in fp32, and
the labels once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.device.row_blocks import (
    accumulate_dtype,
    acts_as_accelerator,
    is_fake_accelerator,
    row_blocks,
    spans,
    temporary_blocks,
)
from engine.kernels.dispatch import uses_triton


@dataclass(frozen=True)
class VocabularyRanks:
    """The ranks that hold slices of the vocabulary, as many rows of the weight each, in order of rank.

    gather   [t * n, ...] of own [n, ...]; scatter: own part of the sum over ranks of values [t * n, ...], into `out`
    """

    rank: int
    count: int
    gather: Callable[[Tensor], Tensor]
    scatter: Callable[..., Tensor]


ALONE = VocabularyRanks(0, 1, lambda own: own, lambda values, out: out.copy_(values))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, options: LossConfig, ranks: VocabularyRanks = ALONE
) -> Tensor:
    """Sum over counted rows of -log softmax(hidden @ weight.T)[label] + z_loss * lse**2; fp32 scalar.

    hidden [T, d], weight [V, d], labels [T] int64. Matmuls run in the dtype of `hidden`, softmax and sums in fp32
    (float64 for float64). Where no gradient is wanted (evaluation, frozen inputs) none is computed. The host never
    waits for the device. A second backward of the same loss raises RuntimeError.

    Of several `ranks` each has its slice [V / t, d] of the weight and rows of its own, as many as the others. The loss
    is that of own rows, labels are global ids. All ranks must call, run the backward and scale the loss alike:
    gradients are those of the sum over ranks.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _SummedLoss.apply(hidden, weight, labels, options, ranks)  # type: ignore[no-untyped-call]
    return loss


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: LossConfig, ranks: VocabularyRanks
    ) -> Tensor:
        """One pass over the chunks: the loss sum of own rows; both gradients are kept."""
        wide, whole, weight = accumulate_dtype(hidden.dtype), weight, weight.to(hidden.dtype)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums = _zero_sums(whole, torch.promote_types(wide, whole.dtype)) if ctx.needs_input_grad[1] else ()
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        own_rows = max(1, options.chunk_tokens // ranks.count)
        chunk_rows = min(own_rows, hidden.shape[0]) * ranks.count
        buffer = torch.empty(chunk_rows, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        all_labels = ranks.gather(labels).view(ranks.count, -1)
        overwrite = any(ctx.needs_input_grad)
        for own in spans(hidden.shape[0], own_rows):
            chunk = ranks.gather(hidden[own])
            logits = torch.mm(chunk, weight.t(), out=buffer[: chunk.shape[0]])
            losses = losses_of_logits(logits, all_labels[:, own].flatten(), options, overwrite=overwrite, ranks=ranks)
            total += losses.view(ranks.count, -1)[ranks.rank].sum(dtype=torch.float64)
            if dhidden is not None and ranks.count == 1:
                torch.mm(logits, weight, out=dhidden[own])
            elif dhidden is not None:
                ranks.scatter(torch.mm(logits, weight), out=dhidden[own])
            if sums:
                _add_weight_gradient(sums, logits, chunk)
        ctx.gradients, ctx.weight_dtype = (dhidden, sums), whole.dtype
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients times `dloss`, in their own memory.

        Always multiplied: to look whether the scalar is 1 would make the host wait for the device.
        """
        kept, ctx.gradients = ctx.gradients, None
        if kept is None:
            raise RuntimeError(
                "linear_cross_entropy gave its gradients away in its first backward pass; for another one call it again"
            )
        dhidden, sums = kept
        return (
            None if dhidden is None else _scaled_in_place([dhidden], dloss, dhidden.dtype),
            _scaled_in_place(sums, dloss, ctx.weight_dtype) if sums else None,
            *(None, None, None),
        )


def _zero_sums(weight: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Zeros [V, d] in `dtype`, in so few slices of rows that the first has room for all rows in the weight's own.

    A multiple of 8 rows: fast products want the second slice's logits to begin at a multiple of 16 bytes.
    """
    narrower = dtype.itemsize // weight.dtype.itemsize
    rows = -(-weight.shape[0] // (8 * narrower)) * 8
    return [torch.zeros(part.shape, dtype=dtype, device=part.device) for part in torch.split(weight, rows)]


def _scaled_in_place(parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, d] in `dtype`: all rows of `parts` times the scalar, rounded once, in the memory of the first part."""
    out = parts[0].view(dtype).view(-1, parts[0].shape[1])
    factor = scale.view(1, 1)  # a GPU rounds a tensor without dimensions to the dtype of the other first
    done = 0
    for part in parts:
        for rows in row_blocks(part.shape[0], part.shape[1], part.device):
            place = out[done + rows.start : done + rows.stop]
            # Narrower rows lie before all that is still to be read, but for the first block's, which lie in it.
            target = place if done + rows.start else torch.empty_like(place)
            place.copy_(torch.mul(part[rows], factor, out=target))
        done += part.shape[0]
    return out[:done]


def losses_of_logits(
    logits: Tensor, labels: Tensor, options: LossConfig, *, overwrite: bool, ranks: VocabularyRanks = ALONE
) -> Tensor:
    """Loss of every row [C] fp32, 0 where its label does not count; `overwrite`: logits [C, V] become its gradient.

    Of several ranks logits are [C, V / t]: one small all-gather. A label that none has gives a loss that is not finite.
    """
    if ranks.count == 1 and not uses_triton(logits) and not is_fake_accelerator():
        return _losses_by_softmax(logits, labels, options, overwrite=overwrite)
    first = ranks.rank * logits.shape[1]
    own = _statistics(logits, labels, first)
    maximum, sums, picked = ranks.gather(own).view(ranks.count, *own.shape).unbind(1)
    top = maximum.amax(dim=0)
    lse = top + (sums * (maximum - top).exp_()).sum(dim=0).log_()
    losses = lse - picked.amax(dim=0)
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    if overwrite:
        _overwrite_with_gradient(logits, labels, lse, first, options.z_loss)
    return losses.masked_fill_(labels == IGNORE_INDEX, 0.0)


def _losses_by_softmax(logits: Tensor, labels: Tensor, options: LossConfig, *, overwrite: bool) -> Tensor:
    """As `losses_of_logits` of whole rows, by torch, which exponentiates once for both results.

    lse is not formed from a sum of exponentials but from the softmax itself, max(logits) - log(max(softmax)): equally
    exact, since the largest probability is at least 1 / V. On a CPU all else takes three times as long: 2.55 against
    0.79 s for 2,048 rows and 32,768 ids with both gradients on two cores.
    """
    found = torch.empty(logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    for rows in row_blocks(logits.shape[0], logits.shape[1], logits.device):
        values = logits[rows].to(found.dtype)
        counted = labels[rows] != IGNORE_INDEX
        index = labels[rows].masked_fill(~counted, 0).unsqueeze(1)
        probabilities = torch.softmax(values, dim=-1)
        lse = values.amax(dim=-1) - probabilities.amax(dim=-1).log_()
        losses = lse - values.gather(1, index).squeeze(1)
        if options.z_loss:
            losses += options.z_loss * lse.square()
        found[rows] = losses.masked_fill_(~counted, 0.0)
        if overwrite:
            # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
            factor = (1.0 + 2.0 * options.z_loss * lse) * counted
            probabilities.mul_(factor.unsqueeze(1))
            probabilities.scatter_add_(1, index, -counted.to(found.dtype).unsqueeze(1))
            logits[rows].copy_(probabilities)
    return found


def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """[3, C] fp32 of the logits of ids from `first` on: maximum, sum of exponentials less it, logit of the label or
    -inf.
    """
    if uses_triton(logits):
        from engine.kernels import cross_entropy as kernels

        return kernels.statistics(logits, labels, first)
    own = torch.empty(3, logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    for rows in temporary_blocks(logits):
        values = logits[rows].to(own.dtype, copy=True)
        index, is_here = _local_index(labels[rows], first, logits.shape[1])
        own[0, rows] = values.amax(dim=-1)
        own[2, rows] = values.gather(1, index).squeeze(1).masked_fill_(~is_here, float("-inf"))
        own[1, rows] = values.sub_(own[0, rows].unsqueeze(1)).exp_().sum(dim=-1)
    return own


def _overwrite_with_gradient(logits: Tensor, labels: Tensor, lse: Tensor, first: int, z_loss: float) -> None:
    """Turns logits of ids from `first` on into the gradient of the loss sum with respect to them."""
    if uses_triton(logits):
        from engine.kernels import cross_entropy as kernels

        kernels.overwrite_with_gradient(logits, labels, lse, first, z_loss)
        return
    for rows in temporary_blocks(logits):
        index, is_here = _local_index(labels[rows], first, logits.shape[1])
        gradient = logits[rows].to(lse.dtype).sub_(lse[rows].unsqueeze(1)).exp_()  # wide logits in their own memory
        # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
        gradient.mul_(((1.0 + 2.0 * z_loss * lse[rows]) * (labels[rows] != IGNORE_INDEX)).unsqueeze(1))
        gradient.scatter_add_(1, index, -is_here.to(lse.dtype).unsqueeze(1))
        logits[rows].copy_(gradient)


def _local_index(labels: Tensor, first: int, ids: int) -> tuple[Tensor, Tensor]:
    """(column of the labels [C, 1], 0 where there is none, whether there is one [C])."""
    index = labels - first
    is_here = (index >= 0) & (index < ids) & (labels != IGNORE_INDEX)
    return index.masked_fill_(~is_here, 0).unsqueeze(1), is_here


def _add_weight_gradient(sums: Sequence[Tensor], dlogits: Tensor, hidden: Tensor) -> None:
    """Adds dlogits.T @ hidden to `sums`, slices of a [V, d], in their dtype."""
    for total, columns in zip(sums, torch.split(dlogits, sums[0].shape[0], dim=1), strict=True):
        if columns.dtype == total.dtype:
            torch.addmm(total, columns.t(), hidden, out=total)  # FlopCounterMode does not know addmm_
        elif acts_as_accelerator(columns.device):
            # The library's product adds to `total` as it is written: no product of its own in memory, none in a
            # rehearsal.
            if not is_fake_accelerator():  # torch 2.11 cannot make it without values
                torch.addmm(total, columns.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            # The CPU has no bf16 matmul with an fp32 result: each chunk's product is rounded once, the sum never.
            for rows in row_blocks(total.shape[0], total.shape[1], total.device):
                total[rows] += torch.mm(columns[:, rows].t(), hidden)
