"""Iterates over a tensor in blocks of rows, so that fp32 temporaries are bounded and, on a CPU, stay in cache.

Statistics, rotations and softmax are computed in fp32 whatever the dtype of the tensors. A whole fp32 copy would be
written to and read from main memory by every operation; a block of it stays in cache for all of them.

A prediction of memory (`engine.training.fake_run.memory`) runs the same code on tensors without values. While it does,
`use_fake_run` sets which device they represent, and loops visit their first two spans and the last: those in between
need the same memory as the second, which starts with what the first left allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch

Item = TypeVar("Item")

# Measured on 2 cores with 1 MiB of L2 each: 2**18 to 2**20 elements are equally fast, smaller ones pay for calls.
CPU_BLOCK_ELEMENTS = 2**19
# On an accelerator blocks only bound memory (256 MiB of fp32 per temporary); each costs a few kernel launches.
ACCELERATOR_BLOCK_ELEMENTS = 2**26


@dataclass(frozen=True)
class FakeRun:
    """How code runs on tensors without values.

    Attributes:
        as_accelerator: CPU tensors represent those of an accelerator.
        ends_only: Loops over spans visit their first two and the last.
    """

    as_accelerator: bool = False
    ends_only: bool = True


_FAKE_RUN: ContextVar[FakeRun | None] = ContextVar("fake_run", default=None)


@contextmanager
def use_fake_run(fake_run: FakeRun) -> Iterator[None]:
    """Apply `fake_run` inside the body, in this thread or task only; results are meaningless."""
    token = _FAKE_RUN.set(fake_run)
    try:
        yield
    finally:
        _FAKE_RUN.reset(token)


def is_fake_accelerator() -> bool:
    """Return whether CPU tensors represent those of an accelerator; some work is skipped then."""
    fake_run = _current_fake_run()
    return fake_run is not None and fake_run.as_accelerator


def _current_fake_run() -> FakeRun | None:
    # The compiler cannot trace a ContextVar, and compiled code is never part of a fake run.
    return None if torch.compiler.is_compiling() else _FAKE_RUN.get()


def acts_as_accelerator(device: torch.device) -> bool:
    """Return whether `device` is an accelerator, or represents one in a fake run."""
    return device.type != "cpu" or is_fake_accelerator()


def spans(total: int, size: int, *, leave_nothing: bool = False) -> Iterator[slice]:
    """Yield slices of `size` that cover [0, total) in order, the last possibly shorter; in a fake run three.

    leave_nothing   a slice leaves nothing allocated for the next; then a fake run visits the first alone
    """
    fake_run = _current_fake_run()
    starts: range | tuple[int, ...] = range(0, total, size)
    if fake_run is not None and fake_run.ends_only:
        if leave_nothing and starts:
            starts = (0,)
        elif len(starts) > 3:
            starts = (starts[0], starts[1], starts[-1])
    for start in starts:
        yield slice(start, min(start + size, total))


def ends(items: Sequence[Item]) -> Sequence[Item]:
    """Return all items of a loop; in a fake run the first two and the last, as in `spans`."""
    fake_run = _current_fake_run()
    if fake_run is None or not fake_run.ends_only or len(items) <= 3:
        return items
    return (items[0], items[1], items[-1])


def row_blocks(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that cover [0, rows) in order, each of at least one row and about one block of elements."""
    limit = ACCELERATOR_BLOCK_ELEMENTS if acts_as_accelerator(device) else CPU_BLOCK_ELEMENTS
    return spans(rows, max(1, limit // max(1, row_elements)))


def temporary_blocks(rows: torch.Tensor) -> Iterator[slice]:
    """Yield `row_blocks` of [rows, columns]; none in a fake run of an accelerator: its kernels have no temporaries."""
    return iter(()) if is_fake_accelerator() else row_blocks(rows.shape[0], rows.shape[1], rows.device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and sums over values of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
