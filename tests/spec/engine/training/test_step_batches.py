"""Batches of the next step are made beside this one, and are those that would have been made in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import pytest
from testkit.waiting import wait_for

from engine.config.errors import DataError
from engine.config.settings import TrainConfig
from engine.data.sampler import Batch, Sampler
from engine.distributed.mesh import Mesh
from engine.training.batches import StepBatches


class Stream(Sampler):
    """Batches that are nothing but the numbers of their samples; sample `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__([], grad_accum_steps=2)
        self.bad = bad

    def batch(self, step: int, micro_step: int, dp_rank: int, dp_size: int, batch_size: int) -> Batch:
        first = self._first_sample + ((step - self._first_step) * 2 + micro_step) * dp_size * batch_size
        numbers = tuple(range(first + dp_rank * batch_size, first + (dp_rank + 1) * batch_size))
        if self.bad in numbers:
            raise DataError(f"sample {self.bad}")
        return cast(Batch, numbers)


class OneOfTwo:
    dp_rank, dp_size = 1, 2


@contextmanager
def batches(steps: int, prepare: Callable[[Any], Any] = lambda batch: batch, **how: Any) -> Iterator[StepBatches]:
    train = TrainConfig(steps=steps, micro_batch_size=2, grad_accum_steps=2)
    with closing(StepBatches(Stream(**how), train, cast(Mesh, OneOfTwo), prepare)) as made:
        yield made


class Prepared:
    """Prepares nothing, and remembers of what and by whom it was asked to."""

    def __init__(self) -> None:
        self.first: list[int] = []

    def __call__(self, numbers: Any) -> Any:
        self.first.append(numbers[0])
        return numbers


def test_every_step_takes_its_samples_also_after_a_rewind() -> None:
    prepared = Prepared()
    with batches(9, prepared) as made:
        made.start_at(0, 0)
        assert [made.take(step) for step in range(3)] == [[(2, 3), (6, 7)], [(10, 11), (14, 15)], [(18, 19), (22, 23)]]
        wait_for(lambda: len(prepared.first) == 8)
        made.start_at(3, 100)  # which was begun
        assert made.take(3) == [(102, 103), (106, 107)]
        made.start_at(1, 200)
        assert made.take(1) == [(202, 203), (206, 207)]
        assert made.take(2) == [(210, 211), (214, 215)]


def test_batches_are_prepared_one_step_ahead_up_to_the_last_step() -> None:
    prepared = Prepared()
    with batches(2, prepared) as made:
        made.take(0)
        wait_for(lambda: len(prepared.first) == 4)
        made.take(1)
    assert prepared.first == [2, 6, 10, 14]


def test_what_cannot_be_read_ends_the_step_that_needs_it() -> None:
    with batches(9, bad=14) as made:
        assert made.take(0) == [(2, 3), (6, 7)]
        with pytest.raises(DataError, match="sample 14"):
            made.take(1)
