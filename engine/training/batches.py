"""The batches of every optimizer step on this rank, those of the next one made while this one runs.

    step n       | forward, backward, update of n      | forward, backward, update of n+1
    a thread     | tokens and plans of n+1             | tokens and plans of n+2

What a batch needs before its first kernel (its tokens read, the attention over its documents planned, its visible pairs
counted) is work of the host, which grows with ranks and documents and would stand between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.config.settings import TrainConfig
from engine.data.sampler import Batch, Sampler
from engine.distributed.mesh import Mesh
from engine.training.train_step import RankBatch


class StepBatches:
    """Batches of this rank by step; `prepare` makes of one what a step takes, also beside evaluations."""

    def __init__(self, sampler: Sampler, train: TrainConfig, mesh: Mesh, prepare: Callable[[Batch], RankBatch]) -> None:
        self._sampler, self._train, self._mesh, self._prepare = sampler, train, mesh, prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next batches")
        self._begun: dict[int, Future[list[RankBatch]]] = {}  # of one step

    def start_at(self, step: int, sample: int) -> None:
        """Step `step` (from 0) begins with sample number `sample` of the stream; what was prepared is forgotten."""
        self._forget()
        self._sampler.start_at(step, sample)

    def take(self, step: int) -> list[RankBatch]:
        """One batch per micro-step of step `step`, from 0; those of the step after it are begun.

        Raises what reading them raised, DataError for one, in the step that needs them.
        """
        if step not in self._begun:
            self._forget()
            self._begun[step] = self._thread.submit(self._make, step)
        batches = self._begun.pop(step).result()
        if step + 1 < self._train.steps:
            self._begun[step + 1] = self._thread.submit(self._make, step + 1)
        return batches

    def close(self) -> None:
        """Ends the thread."""
        self._forget()
        self._thread.shutdown()

    def _make(self, step: int) -> list[RankBatch]:
        mesh, train = self._mesh, self._train
        return [
            self._prepare(self._sampler.batch(step, micro_step, mesh.dp_rank, mesh.dp_size, train.micro_batch_size))
            for micro_step in range(train.grad_accum_steps)
        ]

    def _forget(self) -> None:
        """Once it is over: it reads the sampler."""
        wait(self._begun.values())
        self._begun.clear()
