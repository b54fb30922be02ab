"""Part overlap: what a message adds to the time of a tile that runs beside it, on one device.

A rank sends to itself through NCCL, by the engine's own transport and in the order of a ring step: post, tile, wait. It
takes multiprocessors, queues and launches like a message to a neighbour, and the device's memory instead of a link.

exposed_s       of a tile with a message, less that of the tile alone
exposed_share   of the seconds that the message takes alone: 0 it is hidden, 1 it is not

On a CPU, where nothing runs beside anything, the message is a copy at once: a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from benchmarks.gpu.plan import Measurement, Part, Row
from benchmarks.gpu.tiles import device_inputs
from benchmarks.gpu.timing import time_call
from engine.attention.library import set_sm_carveout
from engine.attention.streams import CudaStreams, StreamTransport
from engine.attention.transport import (
    DistributedTransport,
    GroupMessenger,
    Meter,
    P2POp,
    Transport,
    make_channel_groups,
)
from engine.bench.spec import HeadShape
from engine.distributed.mesh import read_placement, start_process_group
from engine.kernels.attention import select_kernel
from engine.kernels.attention.base import TileGradients
from engine.planning.program.ops import Channel
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Band

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class OverlapSizes:
    """Bytes of the messages, rows of the tile, and what is tried: multiprocessors left free, hardware queues."""

    message_bytes: tuple[int, ...] = (67_108_864, 268_435_456)  # keys and values of 16K and 64K tokens, 8 heads of 128
    tile_tokens: int = 16384
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    comm_sms: tuple[int, ...] = (16, 8)
    max_connections: tuple[int, ...] = (1, 8, 32)
    expected_s: float = 10.0
    weight: float = 4.0


SMALL = OverlapSizes((1 << 16,), 128, (4, 2), 16, comm_sms=(2,), max_connections=(), expected_s=1.0)


def plan(sizes: OverlapSizes) -> Part:
    """As a launch leaves it; then with multiprocessors left free; then with other numbers of hardware queues."""
    tried: list[tuple[str, int | None, int | None]] = [("as launched", None, None)]
    tried += [(f"{count} multiprocessors left free", count, None) for count in sizes.comm_sms]
    tried += [(f"CUDA_DEVICE_MAX_CONNECTIONS={count}", None, count) for count in sizes.max_connections]
    title = "Messages beside a tile"
    return Part("overlap", title, sizes.weight, tuple(_measurement(sizes, *one) for one in tried))


def _measurement(sizes: OverlapSizes, label: str, comm_sms: int | None, max_connections: int | None) -> Measurement:
    settings: Row = {"message_bytes": list(sizes.message_bytes), "tile_tokens": sizes.tile_tokens}
    settings |= {"heads": list(sizes.heads), "head_dim": sizes.head_dim, "comm_sms": comm_sms}
    settings["max_connections"] = max_connections
    environment = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}  # as launches set it
    if max_connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(max_connections)
    function = "benchmarks.gpu.overlap:measure"
    return Measurement(label, function, settings, sizes.expected_s, fresh=True, environment=environment)


def measure(
    device: torch.device,
    message_bytes: Sequence[int],
    tile_tokens: int,
    heads: Sequence[int],
    head_dim: int,
    comm_sms: int | None,
    max_connections: int | None,
) -> list[Row]:
    """One row per size of message."""
    start_process_group(device, read_placement({}))
    set_sm_carveout(comm_sms)
    tile, name = _tile(device, tile_tokens, HeadShape(heads[0], heads[1], head_dim))
    transport = _transport(device, comm_sms)
    tile_s = time_call(tile, device).median_s
    rows = []
    for size in message_bytes:
        ops = _message(device, size)
        numbers = [op.tag for op in ops]

        def step(compute: Callable[[], object], ops: Sequence[P2POp] = ops, ids: list[int] = numbers) -> None:
            transport.post(ops)
            compute()
            transport.wait(ids)

        wire_s = time_call(lambda step=step: step(lambda: None), device).median_s  # type: ignore[misc]
        both_s = time_call(lambda step=step: step(tile), device).median_s  # type: ignore[misc]
        row: Row = {"message_bytes": size, "comm_sms": comm_sms, "max_connections": max_connections}
        row |= {"kernel": name, "tile_tokens": tile_tokens, "tile_s": tile_s, "wire_s": wire_s, "both_s": both_s}
        exposed_s = max(0.0, both_s - tile_s)
        rows.append(row | {"exposed_s": exposed_s, "exposed_share": exposed_s / wire_s})
    return rows


def _tile(device: torch.device, rows: int, shape: HeadShape) -> tuple[Callable[[], object], str]:
    """(forward and backward of a causal tile, its kernel's name)."""
    kernel = select_kernel("auto", device, torch.bfloat16, shape.head_dim).kernel
    q, k, v, dout = device_inputs(shape, rows, device)
    band = Band(0, rows, 0, rows, low=0)
    out, lse = kernel.forward(q, k, v, band)
    grads = TileGradients(dout, out, lse)
    return lambda: (kernel.forward(q, k, v, band), kernel.backward(grads, q, k, v, band)), kernel.name


def _transport(device: torch.device, comm_sms: int | None) -> Transport:
    if device.type == "cpu":
        return DistributedTransport({}, (0,), Topology(1, 1), 0)
    channels = (Channel.PAYLOAD_INNER,)
    groups = make_channel_groups([(0,)], 0, channels, TIMEOUT, device, comm_sms)
    return StreamTransport(CudaStreams(device), GroupMessenger(groups, (0,)), Meter(Topology(1, 1), 0))


def _message(device: torch.device, size_bytes: int) -> list[P2POp]:
    source, target = (torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type == "cpu":
        return [P2POp(0, "store", Channel.TO_HOST, 0, (source,), (target,))]
    channel = Channel.PAYLOAD_INNER
    return [P2POp(0, "send", channel, 0, (source,)), P2POp(1, "recv", channel, 0, (target,))]
