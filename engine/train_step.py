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
from engine.optim import build_optimizer, learning_rate, set_learning_rate
from engine.parallel.fsdp import set_gradient_sync
from engine.parallel.mesh import Mesh
from engine.parallel.reduce import sum_over_ranks
from engine.parallel.shard import LocalBatch, shard_batch
from engine.run.rank_process import RankStatus
from engine.updates import build_updates


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
    ones. `accumulate` and then `update` are a step without its figures: the host waits for the device in neither.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        model: LlamaModel,
        attention: ParallelAttention,
        status: RankStatus | None = None,
    ) -> None:
        self._status = status or RankStatus()
        self.config = config
        self.mesh = mesh
        self.model = model
        self.attention = attention
        self.optimizer = build_optimizer(model, config.optimizer, config.memory.moments_dtype)
        self._updates = build_updates(config, mesh, model, self.optimizer)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Step `step` (from 0) over `batches`, one per micro-step. Raises RunError when training has diverged."""
        local = [rank_batch(batch, self.model, self.attention, self.mesh) for batch in batches]
        # Counted before any backward: each micro-step's gradient must already have its final weight.
        label_tokens = count_labels([batch.rows for batch in local], self.mesh.device)
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate)  # before backward, which may already update weights
        loss_sum = self.accumulate(local, label_tokens)
        norm = self.update()
        self._status.phase = "train"
        result = StepResult(float(loss_sum.item()) / label_tokens, float(norm.item()), rate, label_tokens)
        _check_finite(result, step)
        return result

    def accumulate(self, local: Sequence[RankBatch], label_tokens: int) -> Tensor:
        """Forward and backward: gradients of the mean loss in `.grad`, or in the weights under optimizer_in_backward.

        `label_tokens` counts the labels of all ranks and micro-steps. Returns the loss sum over all ranks, float64
        scalar. All ranks must call.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(local):
            set_gradient_sync(self.model, sync=index == len(local) - 1)
            self._status.phase = "forward"
            hidden = self.model(batch.rows.tokens, batch.rows.positions, batch.attention)
            self._status.phase = "loss"
            loss = self.model.head(hidden, batch.rows.labels)
            del hidden  # would live through the whole backward pass
            self._status.phase = "backward"
            (loss / label_tokens).backward()
            loss_sum += loss.detach()
        return sum_over_ranks(loss_sum)

    def update(self) -> Tensor:
        """Clips, updates the weights and frees the gradients; gives the gradient norm before clipping, fp32 scalar.

        The learning rate must have been set before `accumulate`. All ranks must call.
        """
        self._status.phase = "optimizer"
        return self._updates.finish()


def _check_finite(result: StepResult, step: int) -> None:
    """Raises RunError, on every rank alike, when training has diverged."""
    for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not torch.isfinite(torch.tensor(value)):
            raise RunError(
                f"the {name} of step {step + 1} is {value}: training has diverged. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps or set optimizer.max_grad_norm, "
                "and check the data; nothing after this step would be of use, so the run stops here"
            )
