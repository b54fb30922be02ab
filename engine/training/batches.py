"""The batches of every optimizer step on this rank, prepared one step ahead in a thread.

    main thread  | forward, backward, update of n      | forward, backward, update of n+1
    worker       | tokens and plans of n+1             | tokens and plans of n+2

Before its first kernel a batch needs its tokens read, attention over its documents planned, and its visible pairs
counted. This work on the host grows with ranks and documents and would otherwise delay every step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine.config.settings import TrainConfig
from engine.data.sampler import Batch, Sampler
from engine.distributed.mesh import Mesh
from engine.training.train_step import RankBatch


class StepBatches:
    """Batches of this rank by step.

    Args:
        sampler: Yields whole sequences; only the worker thread reads it.
        train: Micro-steps, batch size and number of steps.
        mesh: Data-parallel rank and size.
        prepare: Converts a batch for `TrainStep.run`; may run during an evaluation.
    """

    def __init__(self, sampler: Sampler, train: TrainConfig, mesh: Mesh, prepare: Callable[[Batch], RankBatch]) -> None:
        self._sampler, self._train, self._mesh, self._prepare = sampler, train, mesh, prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next batches")
        self._pending: dict[int, Future[list[RankBatch]]] = {}  # by step, at most one

    def start_at(self, step: int, sample: int) -> None:
        """Make step `step` (from 0) begin with sample number `sample` of the stream; drops prepared batches."""
        self._drop_pending()
        self._sampler.start_at(step, sample)

    def take(self, step: int) -> list[RankBatch]:
        """Return the batches of step `step` (from 0), one per micro-step, and start preparing those of the next step.

        Errors of the preparation, such as DataError, are raised in the step that needs the batches.
        """
        if step not in self._pending:
            self._drop_pending()
            self._pending[step] = self._thread.submit(self._make, step)
        batches = self._pending.pop(step).result()
        if step + 1 < self._train.steps:
            self._pending[step + 1] = self._thread.submit(self._make, step + 1)
        return batches

    def close(self) -> None:
        """End the worker thread."""
        self._drop_pending()
        self._thread.shutdown()

    def _make(self, step: int) -> list[RankBatch]:
        mesh, train = self._mesh, self._train
        return [
            self._prepare(self._sampler.batch(step, micro_step, mesh.dp_rank, mesh.dp_size, train.micro_batch_size))
            for micro_step in range(train.grad_accum_steps)
        ]

    def _drop_pending(self) -> None:
        wait(self._pending.values())  # the worker must not read the sampler while it is repositioned
        self._pending.clear()
