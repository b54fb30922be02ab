"""A rehearsal visits three spans of rows and stands for an accelerator, in its body only."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.device.row_blocks import (
    FakeRun,
    acts_as_accelerator,
    is_fake_accelerator,
    row_blocks,
    spans,
    use_fake_run,
)

CPU = torch.device("cpu")


def test_a_fake_run_visits_three_sample_spans() -> None:
    with use_fake_run(FakeRun()):
        assert list(spans(45, 10)) == [slice(0, 10), slice(10, 20), slice(40, 45)]
        assert list(spans(25, 10)) == [slice(0, 10), slice(10, 20), slice(20, 25)]
    assert len(list(spans(45, 10))) == 5


def test_blocks_in_a_fake_run_are_as_large_as_on_an_accelerator() -> None:
    on_cpu = next(iter(row_blocks(2**20, 2**10, CPU)))
    with use_fake_run(FakeRun(as_accelerator=True)):
        assert acts_as_accelerator(CPU)
        in_rehearsal = next(iter(row_blocks(2**20, 2**10, CPU)))
    assert in_rehearsal == next(iter(row_blocks(2**20, 2**10, torch.device("cuda"))))
    assert in_rehearsal.stop > on_cpu.stop


def test_fake_accelerator_is_not_seen_by_other_threads() -> None:
    seen: list[bool] = []
    with use_fake_run(FakeRun(as_accelerator=True)):
        other = threading.Thread(target=lambda: seen.append(acts_as_accelerator(CPU)))
        other.start()
        other.join()
    assert seen == [False]


def test_fake_accelerator_ends_with_its_body() -> None:
    with pytest.raises(ValueError, match="broken"), use_fake_run(FakeRun(as_accelerator=True)):
        raise ValueError("broken")
    assert not acts_as_accelerator(CPU)
    assert not is_fake_accelerator()


def test_gpu_is_an_accelerator() -> None:
    assert acts_as_accelerator(torch.device("cuda"))
