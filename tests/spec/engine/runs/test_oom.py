"""Which errors mean lack of memory, what is measured then, and what is advised."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config.cluster import ClusterConfig
from engine.config.settings import AttentionConfig, LossConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.runs.folder import describe_error
from engine.runs.oom import less_memory, measure_out_of_memory

MORE_THAN_ANY_MACHINE = 2**50
CUDA_TEXT = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.15 GiB"


class Greedy(torch.autograd.Function):
    """Asks for too much in its backward pass."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(MORE_THAN_ANY_MACHINE, dtype=torch.uint8)


def test_failure_of_torchs_cpu_allocator_names_the_size_inside_backward_too() -> None:
    x = torch.ones(1, requires_grad=True)
    asked = {
        **{"where": "host", "device": "cpu", "requested_bytes": MORE_THAN_ANY_MACHINE, "capacity_bytes": None},
        "peak_source": "resident set of the process since its start",
    }
    for act in (lambda: torch.empty(MORE_THAN_ANY_MACHINE, dtype=torch.uint8), Greedy.apply(x).backward):  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError) as caught:
            act()
        measured = measure_out_of_memory(caught.value)
        assert measured is not None
        assert measured.pop("peak_bytes") > 2**20
        assert measured == asked


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), "device"),
        (torch.OutOfMemoryError("of another allocator"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (RuntimeError("CUDA error: out of memory"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("std::bad_alloc"), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (ValueError("out of memory"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("out of luck"), None),
    ],
)
def test_the_error_determines_where_memory_ran_out(error: Exception, where: str | None) -> None:
    measured = measure_out_of_memory(error)
    assert (measured and measured["where"]) == where
    assert where != "device" or (measured or {}).items() >= {"device": "cuda", "peak_source": "unknown"}.items()
    assert (describe_error(error)["memory"] is None) == (where is None)


def test_error_that_was_raised_from_lack_of_memory_is_lack_of_memory() -> None:
    raised, handled = RuntimeError("layer 3 failed"), RuntimeError("layer 3 failed")
    raised.__cause__ = handled.__context__ = MemoryError()
    for error in (raised, handled):
        described = describe_error(error)
        assert described["kind"] == "oom"
        assert described["exit_code"] == 1
        assert described["memory"]["where"] == "host"
    handled.__cause__ = ValueError("what it is raised from")
    handled.__cause__.__cause__ = handled  # and nothing else counts
    assert describe_error(handled)["kind"] == "exception"


@pytest.mark.parametrize(
    ("size", "expected"),
    [("20.50 GiB", 41 << 29), ("12 B", 12), ("1.00 KiB", 1 << 10), ("3 MiB", 3 << 20), ("2 TiB", 2 << 40)],
)
def test_the_requested_size_is_parsed_from_the_text_without_an_attribute(size: str, expected: int) -> None:
    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}. GPU 0 has")
    measured = measure_out_of_memory(error)
    assert (measured or {})["requested_bytes"] == expected
    error.requested_bytes = 5  # type: ignore[attr-defined]
    assert measure_out_of_memory(error) == (measured or {}) | {"requested_bytes": 5}


def gpu_config(**memory: Any) -> RunConfig:
    return RunConfig(memory=MemoryConfig(**memory), cluster=ClusterConfig(backend="nccl", ranks_per_node=8))


ON_CPU = ClusterConfig(backend="gloo")
TILE, STORES = "memory.tile_tokens=256", ("memory.activation_store=host", "memory.optimizer_store=host")
POLICY = "memory.activation_checkpoint"
SET_ALREADY = gpu_config(activation_store="host", optimizer_store="host", tile_tokens=256)
LARGE = RunConfig(
    loss=LossConfig(chunk_tokens=10**6), train=TrainConfig(micro_batch_size=2), model=ModelConfig(hidden_size=64)
)
UNKEPT, BOUNDED = MemoryConfig(activation_checkpoint="none"), MemoryConfig(activation_store="host", host_bytes=10**6)
CHUNKED, LAYERS = AttentionConfig(chunk_tokens=8), {"checkpoint_layers": ("none", "full")}
SHORTER = "a smaller train.seq_len"
RANKS = "more ranks (cluster.ranks_per_node), which share one sequence"


@pytest.mark.parametrize(
    ("config", "where", "expected"),
    [
        (
            gpu_config(activation_checkpoint="attn_out"),
            "device",
            [TILE, *STORES, f"{POLICY}=seq_fraction memory.saved_fraction=", f"{POLICY}=full", RANKS, SHORTER],
        ),
        (SET_ALREADY, "device", [RANKS, SHORTER]),
        (
            replace(SET_ALREADY, attention=CHUNKED, memory=replace(SET_ALREADY.memory, **LAYERS, tile_tokens=None)),
            "device",
            [f"{POLICY}=full memory.checkpoint_layers=[]", RANKS, SHORTER],
        ),
        (
            replace(SET_ALREADY, memory=replace(SET_ALREADY.memory, activation_checkpoint="seq_fraction")),
            "device",
            [f"{POLICY}=full", RANKS, SHORTER],
        ),
        (gpu_config(optimizer_store="host"), "host", ["memory.optimizer_store=device", RANKS, SHORTER]),
        (
            gpu_config(activation_store="host", activation_checkpoint="attn_out_every"),
            "host",
            [f"{POLICY}=seq_fraction", f"{POLICY}=full", "memory.activation_store=device", RANKS, SHORTER],
        ),
        (RunConfig(cluster=ON_CPU, memory=UNKEPT), "host", [TILE, f"{POLICY}=attn_out", f"{POLICY}=full", SHORTER]),
        (RunConfig(cluster=ON_CPU, memory=BOUNDED), "host", ["memory.activation_store=device", TILE, SHORTER]),
        (
            LARGE,
            "device",
            ["loss.chunk_tokens=2048", "memory.tile_tokens=64", *STORES, "train.micro_batch_size=1", RANKS, SHORTER],
        ),
    ],
)
def test_advice_is_ordered_by_its_cost(config: RunConfig, where: Any, expected: list[str]) -> None:
    found = less_memory(config, where)
    assert [change[: len(begin)] for change, begin in zip(found, expected, strict=True)] == expected
