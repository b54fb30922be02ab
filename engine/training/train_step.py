"""One optimizer step: loss and gradients are weighted by tokens over all ranks and micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.library import ContextParallel
from engine.attention.runtime import PlannedAttention
from engine.config.settings import RunConfig
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.distributed.collectives import sum_over_ranks
from engine.distributed.mesh import Mesh
from engine.model.dropout import Dropout, row_keys
from engine.model.llama import AttentionFn, LlamaModel
from engine.optim.adamw import build_optimizer, learning_rate, set_learning_rate
from engine.optim.updates import build_updates
from engine.parallel.fsdp import set_gradient_sync
from engine.parallel.shard import LocalBatch, shard_batch
from engine.planning.methods.layers import AttendedPairs, attended_pairs
from engine.training.check_plans import check_plans
from engine.training.guard import NO_LABELS, TAKEN, Guard, Verdict
from engine.training.rank.process import RankStatus


@dataclass(frozen=True)
class StepResult:
    """What a step gave: mean loss per label (nats) and gradient norm before clipping, equal on all ranks.

    Both are None for a step without labels, which computes nothing: `pairs` is zero, the verdict `NO_LABELS`.

    pairs   of all sequences of the step, over all ranks
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    pairs: AttendedPairs
    verdict: Verdict = TAKEN


@dataclass(frozen=True)
class RankBatch:
    """This rank's rows of a batch, the attention of every layer over them, and the numbers of their sequences.

    attended   what attention sees, of all rows of all ranks that share them
    """

    rows: LocalBatch
    attention: Sequence[AttentionFn]
    attended: AttendedPairs
    samples: tuple[int, ...] = ()


def rank_batch(batch: Batch, model: LlamaModel, attention: ContextParallel, mesh: Mesh) -> RankBatch:
    """This rank's part of a batch, laid out as the batch's own documents want it."""
    context = attention.run_context(batch.documents[0])
    rows = shard_batch(
        batch.tokens,
        batch.labels,
        layout=context.layout,
        cp_rank=mesh.cp_rank,
        device=mesh.device,
        label_part=mesh.row_part,
    )
    pairs = attended_pairs(context.layers, len(model.layers), sequences=len(batch.documents))
    return RankBatch(rows, context.functions(len(model.layers)), pairs, batch.samples)


def count_batches(batches: Sequence[RankBatch], mesh: Mesh) -> tuple[int, AttendedPairs]:
    """(labels that count, pairs) over all ranks and all of `batches`, exactly.

    Of ranks that share a sequence the first one tells its pairs.
    """
    labels = torch.stack([(batch.rows.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
    own = [batch.attended for batch in batches] if mesh.cp_rank == mesh.tp_rank == 0 else []
    pairs = torch.tensor([sum(one.visible for one in own), sum(one.again for one in own)], device=mesh.device)
    total, *found = sum_over_ranks(torch.cat([labels.to(mesh.device)[None], pairs])).tolist()
    return total, AttendedPairs(*found)


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
        attention: ContextParallel,
        status: RankStatus | None = None,
    ) -> None:
        self.config, self.mesh, self.model, self.attention = config, mesh, model, attention
        self.status = status or RankStatus()
        self.optimizer = build_optimizer(model, config.optimizer, config.memory.moments_dtype)
        self._updates = build_updates(config, mesh, model, self.optimizer)
        self.guard = Guard(config.train.guard)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Step `step` (from 0) over `batches`, one per micro-step. Raises RunError when training has diverged."""
        return self.run(step, [self.prepare(batch) for batch in batches])

    def prepare(self, batch: Batch) -> RankBatch:
        """What `run` takes of a batch; for the next step while this one runs, too (`engine.training.batches`)."""
        return rank_batch(batch, self.model, self.attention, self.mesh)

    def run(self, step: int, local: Sequence[RankBatch]) -> StepResult:
        """As calling it, over batches that were prepared.

        A step without a single label (a prompt longer than all of its samples) has no loss and no gradient: weights,
        moments and the guard's window stay as they are.
        """
        if self.config.attention.check_plans:
            planned = [one for batch in local for one in batch.attention if isinstance(one, PlannedAttention)]
            check_plans({id(one.runtime): one.runtime for one in planned}.values(), self.mesh)
        self.status.phase = "count labels"
        # Counted before any backward: each micro-step's gradient must already have its final weight.
        with self.status.waits.waiting("all_reduce"):
            label_tokens, pairs = count_batches(local, self.mesh)
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        if label_tokens == 0:  # a sum over ranks, so every rank returns here and no collective is left half-done
            self.status.phase = "train"
            return StepResult(None, None, rate, AttendedPairs(0, 0), NO_LABELS)
        set_learning_rate(self.optimizer, rate)  # before backward, which may already update weights
        loss_sum = self.accumulate(local, label_tokens)
        verdicts: list[Verdict] = []

        def judge(norm: Tensor) -> bool:
            # Reads the device: of a step that cannot be dropped only after its update, for which nobody waits.
            loss, grad_norm = float(loss_sum.item()) / label_tokens, float(norm.item())
            verdicts.append(self.guard.judge(step, loss, grad_norm))
            return verdicts[0].taken

        may_drop = self.config.train.guard.may_drop
        norm = self.update(judge if may_drop else None)
        self.status.phase = "train"
        if not may_drop:
            judge(norm)
        return StepResult(float(loss_sum.item()) / label_tokens, float(norm.item()), rate, pairs, verdicts[0])

    def accumulate(self, local: Sequence[RankBatch], label_tokens: int) -> Tensor:
        """Forward and backward: gradients of the mean loss in `.grad`, or in the weights under optimizer_in_backward.

        `label_tokens` counts the labels of all ranks and micro-steps. Returns the loss sum over all ranks, float64
        scalar. All ranks must call.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(local):
            set_gradient_sync(self.model, is_last=index == len(local) - 1)
            self.status.micro_step, self.status.phase = index, "forward"
            self.status.faults.at_forward(self.status.step)
            hidden = self.model(batch.rows.tokens, batch.rows.positions, batch.attention, self._dropout_of(batch))
            self.status.phase = "loss"
            loss = self.status.faults.at_loss(self.status.step, self.model.head(hidden, batch.rows.labels))
            del hidden  # would live through the whole backward pass
            self.status.phase = "backward"
            (loss / label_tokens).backward()
            loss_sum += loss.detach()
        with self.status.waits.waiting("all_reduce"):
            return sum_over_ranks(loss_sum)

    def _dropout_of(self, batch: RankBatch) -> Dropout | None:
        """What is dropped of the rows that this rank holds between the layers."""
        rate, positions = self.config.train.dropout, batch.rows.positions
        if rate == 0.0:
            return None
        if not batch.samples:
            raise ValueError("train.dropout needs the numbers of a batch's samples")
        own = positions[self.mesh.row_part.of(positions.shape[0])]
        return Dropout(rate, row_keys(self.config.seed, batch.samples, own))

    def update(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Clips, updates the weights and frees the gradients; gives the gradient norm before clipping, fp32 scalar.

        `taken` may refuse the update when it has seen that norm. The learning rate must have been set before
        `accumulate`. All ranks must call. Updates on the host may still be under way when it returns: forward passes
        wait for them, and `wait_pending` does.
        """
        self.status.phase = "optimizer"
        return self._updates.finish(taken)

    def wait_pending(self) -> None:
        """Returns when all weights are updated."""
        self._updates.wait_pending()
