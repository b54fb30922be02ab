"""One optimizer step. Loss and gradients are means over the labels of all ranks and micro-steps.

    count labels (all-reduce) -> per micro-step: forward, loss sum / labels, backward -> judge -> clip, update

Labels are counted first, because ranks and micro-steps have different numbers of them and each must weigh as its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.attention.hugging_face import document_positions
from engine.attention.library import ContextParallel
from engine.attention.runtime import PlannedAttention
from engine.config.settings import RunConfig
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.distributed.collectives import sum_over_ranks
from engine.distributed.mesh import Mesh
from engine.model.decoder import AttentionFn, Decoder, Routing
from engine.model.dropout import Dropout, row_keys
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
    """The figures of one step, equal on all ranks.

    Attributes:
        loss: Mean loss per label, in nats; None for a step without labels.
        grad_norm: Global 2-norm of the gradients before clipping; None for a step without labels.
        learning_rate: The one that the step used.
        pairs: Query-key pairs that attention computed, of all sequences over all ranks; 0 for a step without labels.
        verdict: Whether the weights were updated, and why not; `NO_LABELS` for a step without labels.
        routers: Figures of the routers of experts, by their names in metrics.jsonl; empty without experts.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    pairs: AttendedPairs
    verdict: Verdict = TAKEN
    routers: Mapping[str, float] = field(default_factory=dict)


@dataclass
class StepSums:
    """Sums over the micro-steps of a step.

    Attributes:
        auxiliary: Auxiliary loss of the routers, weighted: this rank's shares, a scalar; None without one.
        routed: Rows of this rank assigned to the experts of every layer, [layers, E]; None without experts.
    """

    auxiliary: Tensor | None = None
    routed: Tensor | None = None

    def add(self, routing: Routing, share: Tensor | None) -> None:
        """Add a micro-step, and its share of the auxiliary loss."""
        if share is not None:
            self.auxiliary = share.detach() if self.auxiliary is None else self.auxiliary + share.detach()
        self.routed = routing.counts if self.routed is None else self.routed + routing.counts

    def figures(self) -> dict[str, float]:
        """Return the figures of `StepResult.routers`. Collective over all ranks if there are experts."""
        if self.routed is None:
            return {}
        share = torch.zeros((), device=self.routed.device) if self.auxiliary is None else self.auxiliary
        auxiliary, *rows = sum_over_ranks(torch.cat([share.double()[None], self.routed.double().flatten()])).tolist()
        counts = torch.tensor(rows).view(self.routed.shape)
        load = counts / counts.mean(dim=1, keepdim=True)  # 1 where every expert of the layer has as many rows
        figures = {"expert_load_max": float(load.max()), "idle_experts": float((counts == 0).sum())}
        return figures if self.auxiliary is None else figures | {"auxiliary_loss": auxiliary}


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a batch.

    Attributes:
        rows: Local tokens, labels and positions.
        attention: One function per layer, planned for the batch's documents.
        attended: Query-key pairs of all rows of the ranks that share these sequences.
        samples: Numbers of the sequences in the training stream, which key dropout.
        real: Which rows are no padding, [T] bool.
    """

    rows: LocalBatch
    attention: Sequence[AttentionFn]
    attended: AttendedPairs
    samples: tuple[int, ...] = ()
    real: Tensor | None = None


def rank_batch(batch: Batch, model: Decoder, attention: ContextParallel, mesh: Mesh) -> RankBatch:
    """Take this rank's part of a batch of whole sequences, [B, N] -> [B, T], in the layout of the batch's documents."""
    context = attention.run_context(batch.documents[0])  # all sequences of a batch have the same documents
    rows = shard_batch(
        batch.tokens,
        batch.labels,
        layout=context.layout,
        cp_rank=mesh.cp_rank,
        device=mesh.device,
        label_part=mesh.row_part,
    )
    real = rows.positions < context.seq_len
    if model.restarts_positions:
        starts = batch.documents[0].tolist() if attention.config.attention.documents else []
        rows = replace(rows, positions=document_positions(rows.positions, context.seq_len, starts))
    pairs = attended_pairs(context.layers, len(model.layers), sequences=len(batch.documents))
    return RankBatch(rows, context.functions(len(model.layers)), pairs, batch.samples, real)


def count_batches(batches: Sequence[RankBatch], mesh: Mesh) -> tuple[int, AttendedPairs]:
    """Return the labels that count and the attended pairs, summed exactly over all ranks and `batches`. Collective."""
    labels = torch.stack([(batch.rows.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
    # Ranks that share a sequence know the same pairs; only the first of them contributes.
    counted = [batch.attended for batch in batches] if mesh.cp_rank == mesh.tp_rank == 0 else []
    pairs = torch.tensor([sum(p.visible for p in counted), sum(p.again for p in counted)], device=mesh.device)
    total, *pair_counts = sum_over_ranks(torch.cat([labels.to(mesh.device)[None], pairs])).tolist()
    return total, AttendedPairs(*pair_counts)


class TrainStep:
    """Runs optimizer steps on a parallelized model; owns the optimizer and the guard.

    Collective over all ranks. Each rank passes the batches of its data-parallel rank, so ranks that share a sequence
    pass equal ones. `accumulate` followed by `update` is a step without figures, in which the host never waits for the
    device.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        model: Decoder,
        attention: ContextParallel,
        status: RankStatus | None = None,
    ) -> None:
        self.config, self.mesh, self.model, self.attention = config, mesh, model, attention
        self.status = status or RankStatus()
        self.optimizer = build_optimizer(model, config.optimizer, config.memory.moments_dtype)
        self._updates = build_updates(config, mesh, model, self.optimizer)
        self.guard = Guard(config.train.guard)

    def __call__(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Run step `step` (from 0) over `batches`, one per micro-step. Raises RunError when training has diverged."""
        return self.run(step, [self.prepare(batch) for batch in batches])

    def prepare(self, batch: Batch) -> RankBatch:
        """Convert a batch for `run`, also for the next step while this one runs (`engine.training.batches`)."""
        return rank_batch(batch, self.model, self.attention, self.mesh)

    def run(self, step: int, local: Sequence[RankBatch]) -> StepResult:
        """Run step `step` (from 0) over prepared batches, one per micro-step.

        A step without any label (each prompt fills its sample) has no loss and no gradient: weights, moments and the
        guard's window stay unchanged.

        Raises:
            RunError: Training has diverged, as train.guard defines it.
        """
        if self.config.attention.check_plans:
            planned = [one for batch in local for one in batch.attention if isinstance(one, PlannedAttention)]
            check_plans({id(one.runtime): one.runtime for one in planned}.values(), self.mesh)
        self.status.phase = "count labels"
        # Count before any backward: a micro-step's gradient is divided by the labels of all micro-steps and ranks.
        with self.status.waits.waiting("all_reduce"):
            label_tokens, pairs = count_batches(local, self.mesh)
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        if label_tokens == 0:  # a sum over ranks, so every rank returns here and no collective is left half-done
            self.status.phase = "train"
            return StepResult(None, None, rate, AttendedPairs(0, 0), NO_LABELS)
        set_learning_rate(self.optimizer, rate)  # before backward, which updates weights under optimizer_in_backward
        sums = StepSums()
        loss_sum = self.accumulate(local, label_tokens, sums)
        verdicts: list[Verdict] = []

        def judge(norm: Tensor) -> bool:
            # .item() waits for the device. A step that cannot be dropped is therefore judged after its update.
            loss, grad_norm = float(loss_sum.item()) / label_tokens, float(norm.item())
            verdicts.append(self.guard.judge(step, loss, grad_norm))
            return verdicts[0].taken

        may_drop = self.config.train.guard.may_drop
        norm = self.update(judge if may_drop else None)
        self.status.phase = "train"
        if not may_drop:
            judge(norm)
        loss = float(loss_sum.item()) / label_tokens
        return StepResult(loss, float(norm.item()), rate, pairs, verdicts[0], sums.figures())

    def accumulate(self, local: Sequence[RankBatch], label_tokens: int, sums: StepSums | None = None) -> Tensor:
        """Run forward and backward of all micro-steps. Collective over all ranks.

        Gradients of the mean loss are left in `.grad`, or applied to the weights under optimizer_in_backward.

        Args:
            local: This rank's batches, one per micro-step.
            label_tokens: Labels that count, of all ranks and micro-steps.
            sums: Gets what routers chose.

        Returns:
            The loss summed over the labels of all ranks, float64 scalar.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for index, batch in enumerate(local):
            set_gradient_sync(self.model, is_last=index == len(local) - 1)
            self.status.micro_step, self.status.phase = index, "forward"
            self.status.faults.at_forward(self.status.step)
            routing = self.model.routing(batch.real)
            rows = batch.rows
            hidden = self.model(rows.tokens, rows.positions, batch.attention, self._dropout_of(batch), routing)
            self.status.phase = "loss"
            loss = self.status.faults.at_loss(self.status.step, self.model.head(hidden, rows.labels))
            del hidden  # else it would stay alive through the whole backward pass
            mean = loss / label_tokens
            if routing is not None:
                share = routing.auxiliary_loss()
                share = None if share is None else share / len(local)
                mean = mean if share is None else mean + share
                if sums is not None:
                    sums.add(routing, share)
            self.status.phase = "backward"
            mean.backward()  # FSDP sums over ranks, so this yields the gradient of the mean
            loss_sum += loss.detach()
        with self.status.waits.waiting("all_reduce"):
            return sum_over_ranks(loss_sum)

    def _dropout_of(self, batch: RankBatch) -> Dropout | None:
        """Return the dropout of the rows that this rank holds between layers, or None if the rate is 0."""
        rate, positions = self.config.train.dropout, batch.rows.positions
        if rate == 0.0:
            return None
        if not batch.samples:
            raise ValueError("train.dropout: the batch has no sample numbers, expected one per sequence")
        local_positions = positions[self.mesh.row_part.of(positions.shape[0])]  # [T] -> [T / tp_size]
        return Dropout(rate, row_keys(self.config.seed, batch.samples, local_positions))

    def update(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Clip, update the weights and free the gradients; return the gradient norm before clipping, fp32 scalar.

        Collective over all ranks. Updates on the host may still run when it returns; forward passes and
        `wait_pending` wait for them. The learning rate must have been set before `accumulate`.

        Args:
            taken: Called with the norm; returns whether to update the weights. None: always.
        """
        self.status.phase = "optimizer"
        return self._updates.finish(taken)

    def wait_pending(self) -> None:
        """Block until all weights are updated."""
        self._updates.wait_pending()
