"""One optimizer step: the loss is weighted by tokens over all ranks and micro-steps, gradients are reduced once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.api import ParallelAttention
from engine.config import RunConfig
from engine.data.sampler import Batch
from engine.errors import RunError
from engine.loss.options import IGNORE_INDEX
from engine.model.llama import AttentionFn, LlamaModel
from engine.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from engine.parallel.fsdp import set_gradient_sync
from engine.parallel.mesh import Mesh
from engine.parallel.reduce import sum_over_ranks
from engine.parallel.shard import LocalBatch, shard_batch


@dataclass(frozen=True)
class StepResult:
    """What a step gave: mean loss per label (nats) and gradient norm before clipping, equal on all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    label_tokens: int


@dataclass(frozen=True)
class RankBatch:
    """This rank's rows of a batch and the attention of every layer over them."""

    rows: LocalBatch
    attention: Sequence[AttentionFn]


def rank_batch(batch: Batch, model: LlamaModel, attention: ParallelAttention, mesh: Mesh) -> RankBatch:
    """This rank's part of a batch, laid out as the batch's own documents want it."""
    context = attention.context(batch.documents[0])
    rows = shard_batch(
        batch.tokens,
        batch.labels,
        layout=context.layout,
        cp_rank=mesh.cp_rank,
        device=mesh.device,
        label_part=mesh.row_part,
    )
    return RankBatch(rows, context.functions(len(model.layers)))


def sequence_loss(model: LlamaModel, batch: LocalBatch, attention: AttentionFn | Sequence[AttentionFn]) -> Tensor:
    """Sum of the loss over this rank's labels, fp32 scalar."""
    hidden = model(batch.tokens, batch.positions, attention)
    loss: Tensor = model.head(hidden, batch.labels)
    return loss


def count_labels(batches: Sequence[LocalBatch], device: torch.device) -> int:
    """Labels that count, over all ranks and all of `batches`; raises RunError when there are none."""
    counts = [(batch.labels != IGNORE_INDEX).sum() for batch in batches]
    total = int(sum_over_ranks(torch.stack(counts).sum().to(device)).item())
    if total == 0:
        raise RunError("no token of this batch has a label, so there is no loss; check the data and train.seq_len")
    return total


class TrainStep:
    """Runs optimizer steps on a parallelized model; holds the optimizer and nothing else that changes.

    Every rank of the run calls it with its own data-parallel rank's batches; ranks that share a sequence with equal
    ones.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, model: LlamaModel, attention: ParallelAttention) -> None:
        self.config = config
        self.mesh = mesh
        self.model = model
        self.attention = attention
        self.optimizer = build_optimizer(model, config.optimizer)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Step `step` (from 0) over `batches`, one per micro-step. Raises RunError when training has diverged."""
        local = [rank_batch(batch, self.model, self.attention, self.mesh) for batch in batches]
        # Counted before any backward: each micro-step's gradient must already have its final weight.
        label_tokens = count_labels([batch.rows for batch in local], self.mesh.device)
        loss_sum = self._accumulate(local, label_tokens)
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate)
        norm = clip_gradients(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        result = StepResult(float(loss_sum.item()) / label_tokens, float(norm.item()), rate, label_tokens)
        _check_finite(result, step)
        return result

    def _accumulate(self, local: Sequence[RankBatch], label_tokens: int) -> Tensor:
        """Gradients of the mean loss in `.grad`; returns the loss sum over all ranks, float64 scalar."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(local):
            set_gradient_sync(self.model, sync=index == len(local) - 1)
            loss = sequence_loss(self.model, batch.rows, batch.attention)
            (loss / label_tokens).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        return sum_over_ranks(loss_sum)


def _check_finite(result: StepResult, step: int) -> None:
    """Raises RunError, on every rank alike, when training has diverged."""
    for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not torch.isfinite(torch.tensor(value)):
            raise RunError(
                f"the {name} of step {step + 1} is {value}: training has diverged. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps or set optimizer.max_grad_norm, "
                "and check the data; nothing after this step would be of use, so the run stops here"
            )
