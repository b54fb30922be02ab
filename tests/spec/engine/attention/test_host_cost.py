"""What the host does for a tile of a plan, beside its kernel: on a GPU small tiles are bound by it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from testkit.attention_oracle import random_inputs
from testkit.operations import Operations
from torch import Tensor

from engine.attention.context import AttentionGroup, build_context
from engine.attention.runtime import AttentionRuntime
from engine.attention.streams import StreamTransport
from engine.attention.transport import Meter
from engine.kernels.attention.base import TileGradients, TileResult
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.planning.methods.layers import LayerAttention
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Band, Mask

RANKS, ROWS = 64, 64  # a tile per step
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


class IdleKernel:
    """Gives numbers that lie ready."""

    name = "idle"
    capabilities = CpuFlashKernel.capabilities

    def __init__(self) -> None:
        x = random_inputs(ROWS, HEADS, KV_HEADS, HEAD_DIM, torch.float32)
        self._out, self._lse, self._k, self._v = x.q, torch.zeros(ROWS, HEADS), x.k, x.v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        return self._out[: len(q)], self._lse[: len(q)]

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        return TileResult(self._out[: len(q)], self._k[: len(k)], self._v[: len(k)])


class IdleStreams:
    """Streams, events and messages that do nothing."""

    def record(self, stream: object) -> object:
        return object()

    def hold(self, stream: object, event: object) -> None:
        pass

    def under(self, stream: object) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, source: Tensor, target: Tensor) -> None:
        raise AssertionError("nothing lies on the host")

    def start(self, channel: object, ops: object) -> list[list[Any]]:
        return []


def python_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions in `run`."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def passes(circulates: str) -> tuple[AttentionRuntime, dict[str, Callable[[], object]]]:
    """The middle rank of a causal ring over streams, and its two passes."""
    topology, idle = Topology(1, RANKS), IdleStreams()
    method = AttentionMethod("burst", "zigzag", 1, RANKS, circulates, "float32")  # type: ignore[arg-type]
    transport = StreamTransport(idle, idle, Meter(topology, RANKS // 2))
    group = AttentionGroup(RANKS // 2, topology, transport, IdleKernel())
    (runtime,) = build_context(group, [LayerAttention(Mask(RANKS * ROWS), method)], RANKS * ROWS).runtimes
    x = random_inputs(ROWS, HEADS, KV_HEADS, HEAD_DIM, torch.float32)

    def forward() -> Any:
        execution = runtime.forward_execution(x.q, x.k, x.v)
        execution.run()
        return runtime.collect(execution, x.q, x.k, x.v)[1]

    saved = forward()
    return runtime, {"forward": forward, "backward": lambda: runtime.backward_execution(saved, x.dout, KV_HEADS).run()}


@pytest.mark.parametrize(
    ("circulates", "direction", "most_calls"),
    # Before November 2026: 125, 208 and 214 calls.
    [("kv", "forward", 48), ("kv", "backward", 85), ("q", "backward", 92)],
)
def test_a_tile_costs_the_host_few_python_calls(circulates: str, direction: str, most_calls: int) -> None:
    runtime, run = passes(circulates)
    tiles = len(list(getattr(runtime, direction).tiles()))
    assert tiles == RANKS
    run[direction]()  # fills caches
    assert python_calls(run[direction]) / tiles <= most_calls


@pytest.mark.parametrize(
    ("circulates", "direction", "most_operations"),
    # Before November 2026: 26, 30 and 32 operators.
    [("kv", "forward", 11), ("kv", "backward", 9), ("q", "backward", 13)],
)
def test_a_tile_costs_the_host_few_operators(circulates: str, direction: str, most_operations: int) -> None:
    _, run = passes(circulates)
    run[direction]()  # fills caches
    operations: list[str] = []
    with Operations(lambda function, *_: operations.append(str(function))):
        run[direction]()
    assert len(operations) / RANKS <= most_operations
