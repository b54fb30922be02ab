"""Which errors mean lack of memory, what is measured then, and what is advised."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

import pytest
import torch

from engine.config.cluster import ClusterConfig
from engine.config.settings import LossConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.runs.folder import describe_error
from engine.runs.oom import is_out_of_memory, less_memory, less_memory_text, measure_out_of_memory

MORE_THAN_ANY_MACHINE = 2**50
CUDA_TEXT = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.15 GiB"


def raised(act: Any) -> BaseException:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_failure_of_torchs_cpu_allocator_names_what_was_asked() -> None:
    error = raised(lambda: torch.empty(MORE_THAN_ANY_MACHINE, dtype=torch.uint8))
    measured = measure_out_of_memory(error)
    assert measured is not None
    assert (measured.where, measured.device, measured.asked_bytes) == ("host", "cpu", MORE_THAN_ANY_MACHINE)
    assert measured.peak_bytes is not None
    assert measured.peak_bytes > 2**20


def test_failure_inside_backward_is_still_found() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.empty(MORE_THAN_ANY_MACHINE, dtype=torch.uint8)

    x = torch.ones(1, requires_grad=True)
    assert is_out_of_memory(raised(lambda: Greedy.apply(x).backward()))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("std::bad_alloc"), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
    ],
)
def test_place_is_told_by_the_error(error: Exception, where: str) -> None:
    measured = measure_out_of_memory(error)
    assert measured is not None
    assert measured.where == where


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), OSError(errno.ENOSPC, "No space left on device"), RuntimeError("out of luck")],
)
def test_other_errors_are_not_lack_of_memory(error: Exception) -> None:
    assert measure_out_of_memory(error) is None
    assert describe_error(error)["memory"] is None


def test_error_that_was_raised_from_lack_of_memory_is_lack_of_memory() -> None:
    def fail() -> None:
        try:
            bytearray(MORE_THAN_ANY_MACHINE)
        except MemoryError as error:
            raise RuntimeError("layer 3 failed") from error

    described = describe_error(raised(fail))
    assert (described["kind"], described["exit_code"]) == ("oom", 1)
    assert described["memory"]["where"] == "host"


def gpu_config(**memory: Any) -> RunConfig:
    return RunConfig(memory=MemoryConfig(**memory), cluster=ClusterConfig(backend="nccl", ranks_per_node=8))


def test_advice_goes_from_cheap_to_dear() -> None:
    changes = less_memory(gpu_config(activation_checkpoint="attn_out"), "device")
    first_words = [change.split("=")[0].split(" ")[0] for change in changes]
    assert first_words == [
        "memory.tile_tokens",
        "memory.activation_store",
        "memory.optimizer_store",
        "memory.activation_checkpoint",
        "memory.activation_checkpoint",
        "more",
        "a",
    ]


def test_advice_leaves_out_what_is_set_already() -> None:
    config = gpu_config(activation_store="host", optimizer_store="host", tile_tokens=256)
    assert [change.split(" ")[0] for change in less_memory(config, "device")] == ["more", "a"]


def test_lack_of_host_memory_on_a_gpu_run_brings_things_back_to_the_device() -> None:
    changes = less_memory(gpu_config(optimizer_store="host"), "host")
    assert changes[0] == "memory.optimizer_store=device"
    assert not any("store=host" in change for change in changes)


def test_on_the_cpu_neither_host_stores_nor_more_ranks_help() -> None:
    config = dataclasses.replace(gpu_config(activation_checkpoint="none"), cluster=ClusterConfig(backend="gloo"))
    changes = less_memory(config, "host")
    assert not any("store" in change or "ranks" in change for change in changes)
    assert "memory.activation_checkpoint=attn_out" in changes


def test_large_micro_batches_and_large_chunks_of_logits_are_named() -> None:
    config = RunConfig(
        loss=LossConfig(chunk_tokens=10**6), train=TrainConfig(micro_batch_size=4), model=ModelConfig(hidden_size=64)
    )
    text = less_memory_text(config, "device")
    assert all(
        words in text for words in ("loss.chunk_tokens=2048", "train.micro_batch_size=1", "memory.tile_tokens=64")
    )


def test_on_the_cpu_a_bounded_store_is_left_first() -> None:
    config = RunConfig(
        cluster=ClusterConfig(backend="gloo"), memory=MemoryConfig(activation_store="host", host_bytes=10**6)
    )
    assert less_memory(config, "host")[0] == "memory.activation_store=device"
