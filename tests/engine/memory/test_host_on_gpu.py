"""Pinned host memory, which only a machine with a GPU has."""

from __future__ import annotations

import pytest
import torch

from engine.memory.host import HostPool


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_pieces_are_not_rounded_up() -> None:
    pool = HostPool(pinned=True)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    (buffers,) = pool.take(5 << 20)
    assert [buffer.is_pinned() for buffer in buffers] == [True, True]
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before <= 5 << 20
