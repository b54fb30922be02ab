"""Fused LM head and cross entropy: computes the loss chunk by chunk, so the logits [T, V] are never materialized.

The gradient of a summed loss with respect to the logits, softmax - onehot, is known as soon as the logits are. So the
forward pass computes both gradients as well, chunk by chunk with three matmuls, and the backward pass only scales them
in place by the incoming scalar. No logits are saved or recomputed; a loss supports one backward pass. Extra memory for
chunks of C rows:

    C * V            logits of one chunk, overwritten by their gradient (compute dtype); freed before backward
    V * d            gradient of the weight in fp32; backward casts it to the dtype of the weight in the same memory
    2 blocks         fp32 softmax, of a size fixed in engine.device.row_blocks; none on a GPU (engine.kernels)

It does not depend on the number of rows. The gradient of `hidden` comes on top.

Vocabulary parallelism: each of t ranks holds V / t rows of the weight and its own rows of `hidden`, so no rank has a
whole row of logits. The ranks process the chunks in lockstep:

    all-gather the chunk's rows                hidden [C, d]
    local logits                               [C, V / t]
    all-gather three numbers per row and rank  maximum, sum of exponentials, logit of the label: lse is exact
    both gradients from the local logits       of the weight's slice; of hidden, summed by a reduce-scatter

With T the rows of all ranks, a rank sends 2 (t - 1) / t T d numbers in the dtype of hidden, 3 (t - 1) T in fp32, and
the labels once. torch's loss_parallel would need the logits of all rows together as a DTensor, saves them for backward,
and has no z-loss.
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
    """The ranks that share the vocabulary: rank i holds rows [i V / t, (i + 1) V / t) of the weight.

    Attributes:
        rank: Index of this rank in the group.
        count: Number of ranks, t.
        gather: All-gather along the first dimension, [n, ...] -> [t * n, ...] in order of rank.
        scatter: Reduce-scatter along it, values [t * n, ...] -> `out` [n, ...]. Both are collective over the tp group.
    """

    rank: int
    count: int
    gather: Callable[[Tensor], Tensor]
    scatter: Callable[..., Tensor]


ALONE = VocabularyRanks(0, 1, lambda local: local, lambda values, out: out.copy_(values))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, options: LossConfig, ranks: VocabularyRanks = ALONE
) -> Tensor:
    """Return the loss summed over labelled rows, -log softmax(hidden @ weight.T)[label] + z_loss * lse**2.

    Matmuls run in the dtype of `hidden`, softmax and sums in fp32 (float64 for float64). Gradients are computed only
    for inputs that require them, and none under no_grad. The host never waits for the device.

    Args:
        hidden: Final hidden states of this rank's rows, [T, d].
        weight: LM head, [V, d]; with several ranks this rank's slice, [V / t, d].
        labels: Global token ids, [T] int64; rows with IGNORE_INDEX (-100) do not count.
        options: Rows per chunk and the z-loss coefficient (PaLM, Chowdhery et al. 2022).
        ranks: The ranks that share the vocabulary. Collective over them: all must call with equally many rows, run
            the backward pass, and scale the loss alike, since gradients are those of the sum over ranks.

    Returns:
        fp32 scalar (float64 for float64), the loss of this rank's rows. Its second backward raises RuntimeError.
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
        """Compute the loss sum of the local rows and, chunk by chunk, both gradients (in ctx.gradients)."""
        # The gradient must have the dtype of `parameter`; matmuls use `weight`, cast to the dtype of `hidden`.
        wide, parameter, weight = accumulate_dtype(hidden.dtype), weight, weight.to(hidden.dtype)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums = _zero_sums(parameter, torch.promote_types(wide, parameter.dtype)) if ctx.needs_input_grad[1] else ()
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)  # fp32 loses digits over a million rows
        local_rows = max(1, options.chunk_tokens // ranks.count)  # this rank's share of a chunk
        chunk_rows = min(local_rows, hidden.shape[0]) * ranks.count
        buffer = torch.empty(chunk_rows, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        all_labels = ranks.gather(labels).view(ranks.count, -1)  # [T] -> [t, T]
        overwrite = any(ctx.needs_input_grad)
        for rows in spans(hidden.shape[0], local_rows):
            chunk = ranks.gather(hidden[rows])  # [C / t, d] -> [C, d]
            # Every chunk writes into the same buffer: the only logits that exist. [C, d] x [d, V / t] -> [C, V / t]
            logits = torch.mm(chunk, weight.t(), out=buffer[: chunk.shape[0]])
            losses = losses_of_logits(logits, all_labels[:, rows].flatten(), options, overwrite=overwrite, ranks=ranks)
            total += losses.view(ranks.count, -1)[ranks.rank].sum(dtype=torch.float64)
            # From here on `logits` holds dlogits.
            if dhidden is not None and ranks.count == 1:
                torch.mm(logits, weight, out=dhidden[rows])
            elif dhidden is not None:
                # Each rank's product covers its slice of the vocabulary only. [C, d] -> [C / t, d]
                ranks.scatter(torch.mm(logits, weight), out=dhidden[rows])
            if sums:
                _add_weight_gradient(sums, logits, chunk)
        # Not save_for_backward: backward overwrites them and hands out their memory.
        ctx.gradients, ctx.weight_dtype = (dhidden, sums), parameter.dtype
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward pass by `dloss` in place.

        Always multiplies: testing whether the scalar is 1 would make the host wait for the device.
        """
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: a second backward pass through the same loss; expected one, since the first "
                "returned the gradients in their own memory. Call linear_cross_entropy again."
            )
        dhidden, sums = gradients
        return (
            None if dhidden is None else _scaled_in_place([dhidden], dloss, dhidden.dtype),
            _scaled_in_place(sums, dloss, ctx.weight_dtype) if sums else None,
            *(None, None, None),
        )


def _zero_sums(weight: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return zeros for [V, d] in `dtype` as slices of rows, the first large enough for all rows in the weight's dtype.

    With a bf16 weight and fp32 sums there are two slices, and `_scaled_in_place` writes the result into the first: the
    second is freed, so the gradient ends in half the memory. Slices have a multiple of 8 rows, because fast matmuls
    need the columns of logits that belong to the second slice to begin at a multiple of 16 bytes.
    """
    narrower = dtype.itemsize // weight.dtype.itemsize  # 2 for fp32 sums of a bf16 weight, else 1
    rows = -(-weight.shape[0] // (8 * narrower)) * 8
    return [torch.zeros(part.shape, dtype=dtype, device=part.device) for part in torch.split(weight, rows)]


def _scaled_in_place(parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all rows of `parts` times the scalar, [rows, d] in `dtype`, rounded once, in the memory of the first."""
    out = parts[0].view(dtype).view(-1, parts[0].shape[1])
    factor = scale.view(1, 1)  # a GPU rounds a tensor without dimensions to the dtype of the other first
    done = 0
    for part in parts:
        for rows in row_blocks(part.shape[0], part.shape[1], part.device):
            written = out[done + rows.start : done + rows.stop]
            # Narrower rows end before the rows still to be read begin. The first block alone overlaps what it reads,
            # so it goes through a temporary.
            target = written if done + rows.start else torch.empty_like(written)
            written.copy_(torch.mul(part[rows], factor, out=target))
        done += part.shape[0]
    return out[:done]


def losses_of_logits(
    logits: Tensor, labels: Tensor, options: LossConfig, *, overwrite: bool, ranks: VocabularyRanks = ALONE
) -> Tensor:
    """Return the loss of every row, [C] fp32, 0 where the label does not count.

    Args:
        logits: [C, V]; with several ranks this rank's columns, [C, V / t].
        labels: Global token ids, [C] int64. An id that no rank holds gives a loss that is not finite.
        options: The z-loss coefficient.
        overwrite: Replace `logits` by the gradient of the summed loss with respect to them.
        ranks: Collective over them: one all-gather of three numbers per row.
    """
    if ranks.count == 1 and not uses_triton(logits) and not is_fake_accelerator():
        return _losses_by_softmax(logits, labels, options, overwrite=overwrite)
    first = ranks.rank * logits.shape[1]
    local = _statistics(logits, labels, first)  # [3, C]
    maximum, sums, picked = ranks.gather(local).view(ranks.count, *local.shape).unbind(1)  # 3 x [t, C]
    # log-sum-exp over ranks: every rank's sum is relative to its own maximum, so rescale to the largest.
    top = maximum.amax(dim=0)
    lse = top + (sums * (maximum - top).exp_()).sum(dim=0).log_()
    losses = lse - picked.amax(dim=0)  # -inf on the ranks that do not hold the label
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    if overwrite:
        _overwrite_with_gradient(logits, labels, lse, first, options.z_loss)
    return losses.masked_fill_(labels == IGNORE_INDEX, 0.0)


def _losses_by_softmax(logits: Tensor, labels: Tensor, options: LossConfig, *, overwrite: bool) -> Tensor:
    """Compute `losses_of_logits` of whole rows with torch.softmax, whose exponentials serve loss and gradient.

    lse is max(logits) - log(max(softmax)) rather than the log of a sum of exponentials: equally exact, since the
    largest probability is at least 1 / V. On a CPU the alternatives take three times as long: 2.55 s against 0.79 s
    for 2,048 rows and 32,768 ids with both gradients on two cores.
    """
    result = torch.empty(logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    for rows in row_blocks(logits.shape[0], logits.shape[1], logits.device):
        values = logits[rows].to(result.dtype)
        counted = labels[rows] != IGNORE_INDEX
        index = labels[rows].masked_fill(~counted, 0).unsqueeze(1)  # gather needs a valid column
        probabilities = torch.softmax(values, dim=-1)
        lse = values.amax(dim=-1) - probabilities.amax(dim=-1).log_()
        losses = lse - values.gather(1, index).squeeze(1)
        if options.z_loss:
            losses += options.z_loss * lse.square()
        result[rows] = losses.masked_fill_(~counted, 0.0)
        if overwrite:
            # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
            factor = (1.0 + 2.0 * options.z_loss * lse) * counted
            probabilities.mul_(factor.unsqueeze(1))
            probabilities.scatter_add_(1, index, -counted.to(result.dtype).unsqueeze(1))
            logits[rows].copy_(probabilities)
    return result


def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """Return maximum, sum of exp(logit - maximum) and logit of the label (-inf if another rank holds it), [3, C] fp32.

    `logits` [C, V / t] are those of the ids from `first` on.
    """
    if uses_triton(logits):
        from engine.kernels import cross_entropy as kernels

        return kernels.statistics(logits, labels, first)
    stats = torch.empty(3, logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    for rows in temporary_blocks(logits):
        values = logits[rows].to(stats.dtype, copy=True)  # a copy even of fp32 logits, since sub_ writes to it
        index, is_local = _local_index(labels[rows], first, logits.shape[1])
        stats[0, rows] = values.amax(dim=-1)
        stats[2, rows] = values.gather(1, index).squeeze(1).masked_fill_(~is_local, float("-inf"))
        stats[1, rows] = values.sub_(stats[0, rows].unsqueeze(1)).exp_().sum(dim=-1)
    return stats


def _overwrite_with_gradient(logits: Tensor, labels: Tensor, lse: Tensor, first: int, z_loss: float) -> None:
    """Replace the logits of ids from `first` on by the gradient of the summed loss with respect to them, in place."""
    if uses_triton(logits):
        from engine.kernels import cross_entropy as kernels

        kernels.overwrite_with_gradient(logits, labels, lse, first, z_loss)
        return
    for rows in temporary_blocks(logits):
        index, is_local = _local_index(labels[rows], first, logits.shape[1])
        # The softmax, exp(logit - lse). `to` does not copy fp32 logits, so those are overwritten right here.
        gradient = logits[rows].to(lse.dtype).sub_(lse[rows].unsqueeze(1)).exp_()
        # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
        gradient.mul_(((1.0 + 2.0 * z_loss * lse[rows]) * (labels[rows] != IGNORE_INDEX)).unsqueeze(1))
        gradient.scatter_add_(1, index, -is_local.to(lse.dtype).unsqueeze(1))
        logits[rows].copy_(gradient)


def _local_index(labels: Tensor, first: int, ids: int) -> tuple[Tensor, Tensor]:
    """Return the local column of every label, [C, 1] (0 where it is not local), and whether it is local, [C] bool."""
    index = labels - first
    is_local = (index >= 0) & (index < ids) & (labels != IGNORE_INDEX)
    return index.masked_fill_(~is_local, 0).unsqueeze(1), is_local


def _add_weight_gradient(sums: Sequence[Tensor], dlogits: Tensor, hidden: Tensor) -> None:
    """Add dlogits.T @ hidden, [V, C] x [C, d], to `sums`, which are slices of rows of a [V, d]."""
    for total, columns in zip(sums, torch.split(dlogits, sums[0].shape[0], dim=1), strict=True):
        if columns.dtype == total.dtype:
            torch.addmm(total, columns.t(), hidden, out=total)  # FlopCounterMode does not know addmm_
        elif acts_as_accelerator(columns.device):
            # cuBLAS accumulates into `total` with fp32 output: no temporary for the product, and none in a fake run.
            if not is_fake_accelerator():  # torch 2.11 cannot run this on tensors without values
                torch.addmm(total, columns.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            # The CPU has no bf16 matmul with an fp32 result: each chunk's product is rounded to bf16 once, the sum is
            # not.
            for rows in row_blocks(total.shape[0], total.shape[1], total.device):
                total[rows] += torch.mm(columns[:, rows].t(), hidden)
