"""Initial weights as a function of (seed, parameter name, row): equal for every world size, sharding and device.

Rows are drawn in blocks of fixed size, each with its own random generator, so a rank draws only the blocks that its
shard overlaps. They are drawn on the CPU, whose generator is the same everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.model.decoder import Decoder, Initial

_BLOCK_ELEMENTS = 2**20  # do not change: another value gives other weights for the same seed


@torch.no_grad()
def init_weights(model: Decoder, seed: int, loaded: Collection[str] = ()) -> None:
    """Initialise every parameter of `model` in place by its `Decoder.initial`, without communication.

    Parameters may be plain tensors or DTensors with any sharding; those named in `loaded` have their values.
    """
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if name in loaded:
            continue
        initial = model.initial(name)
        local, starts = local_block(parameter)
        if initial.std == 0.0:
            local.fill_(initial.mean)
        else:
            _draw_block(local, initial, f"{seed}/{name}", starts=starts, shape=parameter.shape)
        for row in initial.zero_rows:
            if starts[0] <= row < starts[0] + local.shape[0]:
                local[row - starts[0]].zero_()


def local_block(parameter: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of a parameter, and the shard's first index in every dimension."""
    if not isinstance(parameter, DTensor):
        return parameter, [0] * parameter.dim()
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return parameter.to_local(), chunk.offsets


def _draw_block(local: Tensor, initial: Initial, stream: str, *, starts: Sequence[int], shape: torch.Size) -> None:
    """Fill a shard from the random stream `stream`.

    Args:
        local: The shard.
        initial: Mean and standard deviation.
        stream: Seed and name of the parameter.
        starts: The shard's first index in every dimension.
        shape: Of the whole parameter.
    """
    block_rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    offset, end = starts[0], starts[0] + local.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(starts[1:], local.shape[1:], strict=True))
    for block in range(offset // block_rows, -(-end // block_rows)):
        first = block * block_rows
        # Draw the whole block even if a part is needed: values may depend on how many are drawn together.
        values = torch.empty(min(block_rows, shape[0] - first), *shape[1:], dtype=torch.float32)
        generator = _generator(stream, block)
        if initial.kind == "normal":
            values.normal_(initial.mean, initial.std, generator=generator)
        else:
            bound = math.sqrt(3) * initial.std
            values.uniform_(initial.mean - bound, initial.mean + bound, generator=generator)
        if initial.kind == "log_uniform":
            values.log_()
        start, stop = max(offset, first), min(end, first + values.shape[0])
        local[start - offset : stop - offset].copy_(values[(slice(start - first, stop - first), *columns)])


def _generator(stream: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{stream}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
