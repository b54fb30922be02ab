"""LM head and cross entropy in one over ranks that hold slices of the vocabulary: no rank has a whole row of logits.

Every rank has its own rows of `hidden` and all d columns of its slice of the weight. The ranks walk chunks together:

    gather the chunk's rows from all ranks     hidden [C, d]
    local logits                               [C, V / t]
    gather three numbers per row and rank      maximum, sum of exponentials, logit of the label: lse is exact
    both gradients from the local logits       of the weight's slice; of hidden, summed by a reduce-scatter

so gradients are made in the forward pass, as in engine.loss.fused. torch's loss_parallel wants the logits of all rows
at once as a DTensor, keeps them for backward, and knows no z-loss. Sent per rank, with T the rows of all ranks:
2 (t - 1) / t T d numbers in the dtype of hidden, 3 (t - 1) T in fp32, and the labels once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.kernels.dispatch import uses_triton
from engine.loss.fused import Gradients, add_weight_gradient, summed_loss
from engine.loss.options import LossOptions
from engine.parallel.collectives import all_gather_first, reduce_scatter_first
from engine.row_blocks import accumulate_dtype, rehearses_accelerator, row_blocks, spans


@dataclass(frozen=True)
class VocabularySlice:
    """The ranks that share the vocabulary, and how many rows of the weight each of them has, in order of rank."""

    group: dist.ProcessGroup
    rows: int

    @property
    def ranks(self) -> int:
        """Number of slices."""
        return self.group.size()

    @property
    def first_row(self) -> int:
        """Token id of this rank's first row."""
        return self.group.rank() * self.rows


def vocabulary_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, options: LossOptions, vocabulary: VocabularySlice
) -> Tensor:
    """Sum over THIS rank's counted rows of -log softmax(hidden @ weight.T)[label] + z_loss * lse**2; fp32 scalar.

    hidden [R, d] and labels [R] int64 (global ids): own rows, as many on every rank; weight [V / t, d]: own slice. All
    ranks of the group must call, run the backward and scale the loss alike: gradients are those of the sum over ranks.
    """
    return summed_loss(hidden, weight, labels, _Walk(options, vocabulary))


@dataclass(frozen=True)
class _Walk:
    options: LossOptions
    vocabulary: VocabularySlice

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        """See `engine.loss.fused.Walk`: hidden and its gradient [R, d] are own rows, the weight's [V / t, d]."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        own_rows = max(1, self.options.chunk_tokens // self.vocabulary.ranks)
        chunk_rows = min(own_rows, hidden.shape[0]) * self.vocabulary.ranks
        buffer = torch.empty(chunk_rows, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        scratch: Tensor | None = None
        all_labels = all_gather_first(labels, self.vocabulary.group).view(self.vocabulary.ranks, -1)
        for own in spans(hidden.shape[0], own_rows):
            chunk = all_gather_first(hidden[own], self.vocabulary.group)
            chunk_labels = all_labels[:, own].flatten()
            logits = torch.mm(chunk, weight.t(), out=buffer[: chunk.shape[0]])
            lse, losses = self._losses(logits, chunk_labels)
            rows = losses.shape[0] // self.vocabulary.ranks
            total += losses[self.vocabulary.group.rank() * rows :][:rows].sum(dtype=torch.float64)
            if not gradients.are_wanted:
                continue
            self._overwrite_with_gradient(logits, chunk_labels, lse)
            if gradients.hidden is not None:
                reduce_scatter_first(torch.mm(logits, weight), self.vocabulary.group, out=gradients.hidden[own])
            if gradients.weight is not None:
                scratch = add_weight_gradient(gradients.weight, logits, chunk, scratch)
        return total

    def _losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(lse [C], loss [C], 0 where no label counts), fp32, over the whole vocabulary: one small all-gather."""
        own = self._statistics(logits, labels)
        maximum, sums, picked = all_gather_first(own, self.vocabulary.group).view(-1, *own.shape).unbind(1)
        top = maximum.amax(dim=0)
        lse = top + (sums * (maximum - top).exp_()).sum(dim=0).log_()
        losses = lse - picked.sum(dim=0)
        if self.options.z_loss:
            losses = losses + self.options.z_loss * lse.square()
        return lse, losses.masked_fill_(labels == self.options.ignore_index, 0.0)

    def _statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[3, C] fp32 of the local logits: maximum, sum of exponentials less it, logit of the label or 0."""
        if uses_triton(logits):
            from engine.kernels import cross_entropy as kernels

            return kernels.statistics(logits, labels, self.vocabulary.first_row, self.options)
        wide = accumulate_dtype(logits.dtype)
        own = torch.empty(3, logits.shape[0], dtype=wide, device=logits.device)
        for rows in _blocks(logits):
            values = logits[rows].to(wide)
            index, is_here = self._local_index(labels[rows])
            own[0, rows] = values.amax(dim=-1)
            own[1, rows] = (values - own[0, rows].unsqueeze(1)).exp_().sum(dim=-1)
            own[2, rows] = values.gather(1, index).squeeze(1).masked_fill_(~is_here, 0.0)
        return own

    def _overwrite_with_gradient(self, logits: Tensor, labels: Tensor, lse: Tensor) -> None:
        """Turns local logits [C, V / t] into the gradient of the loss sum with respect to them."""
        if uses_triton(logits):
            from engine.kernels import cross_entropy as kernels

            kernels.overwrite_with_gradient(logits, labels, lse, self.vocabulary.first_row, self.options)
            return
        for rows in _blocks(logits):
            index, is_here = self._local_index(labels[rows])
            counted = labels[rows] != self.options.ignore_index
            gradient = (logits[rows].to(lse.dtype) - lse[rows].unsqueeze(1)).exp_()
            # d/dlogits of lse is the softmax, of z * lse**2 it is 2 z lse * softmax.
            gradient.mul_(((1.0 + 2.0 * self.options.z_loss * lse[rows]) * counted).unsqueeze(1))
            gradient.scatter_add_(1, index, -is_here.to(lse.dtype).unsqueeze(1))
            logits[rows].copy_(gradient)

    def _local_index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(row of this rank's slice [C, 1], 0 where it has none, whether it has the label's row [C])."""
        index = labels - self.vocabulary.first_row
        is_here = (index >= 0) & (index < self.vocabulary.rows) & (labels != self.options.ignore_index)
        return index.masked_fill_(~is_here, 0).unsqueeze(1), is_here


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows; none in a rehearsal of a GPU, whose kernels have no temporaries."""
    return iter(()) if rehearses_accelerator() else row_blocks(logits.shape[0], logits.shape[1], logits.device)
