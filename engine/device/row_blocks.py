"""Walking a tensor in blocks of rows, so that wide temporaries are bounded and, on a CPU, stay in cache.

Statistics, rotations and softmax are computed in fp32 whatever the dtype of the tensors. A whole fp32 copy would be
written to and read from main memory by every operation; a block of it lives in cache from the first to the last.

A prediction of memory (`engine.training.fake_run.memory`) runs the same code on tensors without values. While it does,
`rehearse` says which device they stand for, and walks visit their first two spans and the last: those in between need
the same memory as the second, which finds what the first left.
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
    """How code runs whose values nobody reads.

    as_accelerator   tensors of the CPU stand for those of an accelerator
    ends_only        walks visit their first two spans and the last
    """

    as_accelerator: bool = False
    ends_only: bool = True


_REHEARSAL: ContextVar[FakeRun | None] = ContextVar("rehearsal", default=None)


@contextmanager
def rehearse(rehearsal: FakeRun) -> Iterator[None]:
    """Inside the body, in this thread or task alone, code runs as `rehearsal` says; the results are worthless."""
    token = _REHEARSAL.set(rehearsal)
    try:
        yield
    finally:
        _REHEARSAL.reset(token)


def is_fake_accelerator() -> bool:
    """Whether tensors of the CPU stand for an accelerator's now: work whose results it leaves out is never missed."""
    rehearsal = _rehearsal()
    return rehearsal is not None and rehearsal.as_accelerator


def _rehearsal() -> FakeRun | None:
    """The one that is going on; compiled code has none, and the compiler cannot trace the question."""
    return None if torch.compiler.is_compiling() else _REHEARSAL.get()


def acts_as_accelerator(device: torch.device) -> bool:
    """Whether work on `device` is done as an accelerator does it: it is one, or stands for one in a rehearsal."""
    return device.type != "cpu" or is_fake_accelerator()


def spans(total: int, size: int, *, leave_nothing: bool = False) -> Iterator[slice]:
    """Slices of `size` that cover [0, total) in order, the last one maybe shorter; in a rehearsal three of them.

    leave_nothing   all that one needs is free again when the next begins; then a rehearsal visits the first alone
    """
    rehearsal = _rehearsal()
    starts: range | tuple[int, ...] = range(0, total, size)
    if rehearsal is not None and rehearsal.ends_only:
        if leave_nothing and starts:
            starts = (0,)
        elif len(starts) > 3:
            starts = (starts[0], starts[1], starts[-1])
    for start in starts:
        yield slice(start, min(start + size, total))


def ends(items: Sequence[Item]) -> Sequence[Item]:
    """All items of a walk; in a rehearsal the first two and the last, as in `spans`."""
    rehearsal = _rehearsal()
    if rehearsal is None or not rehearsal.ends_only or len(items) <= 3:
        return items
    return (items[0], items[1], items[-1])


def row_blocks(rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover [0, rows) in order, each of at least one row and about one block of elements."""
    limit = ACCELERATOR_BLOCK_ELEMENTS if acts_as_accelerator(device) else CPU_BLOCK_ELEMENTS
    return spans(rows, max(1, limit // max(1, row_elements)))


def temporary_blocks(rows: torch.Tensor) -> Iterator[slice]:
    """`row_blocks` of [rows, columns]; none in a rehearsal of an accelerator, whose kernels have no temporaries."""
    return iter(()) if is_fake_accelerator() else row_blocks(rows.shape[0], rows.shape[1], rows.device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums over values of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
