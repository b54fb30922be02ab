"""Initial weights as a function of (seed, parameter name, row): equal for every world size, sharding and device.

Rows are drawn in blocks of fixed size, each with a random generator of its own, so a rank that holds part of a
parameter draws the blocks it needs and no others. Always drawn on the CPU: its generator is the same everywhere.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engine.model.llama import LlamaModel

_BLOCK_ELEMENTS = 2**20  # part of the definition of the weights: another value gives other weights
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, checkpoint_wrapper


@torch.no_grad()
def init_weights(model: LlamaModel, seed: int) -> None:
    """Sets every parameter of `model` in place, whole or FSDP2-sharded, as after `to_empty`; moves no bytes.

    Norm gains 1; all matrices and the embedding normal with `init_std`; those that write to the residual stream
    (o_proj, down_proj) with init_std / sqrt(2 * num_layers), so that its variance does not grow with depth (GPT-2).
    """
    model.tie_weights()
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        std = _standard_deviation(name, model)
        local, offset = _local_rows(parameter)
        if std is None:
            local.fill_(1.0)
        elif offset is None:
            _fill_any_sharding(parameter, std, f"{seed}/{name}")
        else:
            _draw_rows(local, std, f"{seed}/{name}", offset=offset, total_rows=parameter.shape[0])


def canonical_name(name: str) -> str:
    """The parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _standard_deviation(name: str, model: LlamaModel) -> float | None:
    """Standard deviation of a parameter's initial values; None for a norm gain."""
    if "norm" in name:
        return None
    std = model.config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return std / math.sqrt(2 * model.config.num_layers)
    return std


def _local_rows(parameter: Tensor) -> tuple[Tensor, int | None]:
    """(the rows of `parameter` that this rank holds, index of the first); None as index if it is not split by rows."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    start, length = 0, parameter.shape[0]
    for mesh_dim, placement in enumerate(parameter.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or placement.dim != 0:
            return parameter.to_local(), None
        # Shard(0) splits as torch.chunk does: equal parts, the last ones shorter or empty.
        part = -(-length // parameter.device_mesh.size(mesh_dim))
        skipped = min(parameter.device_mesh.get_local_rank(mesh_dim) * part, length)
        start, length = start + skipped, min(part, length - skipped)
    return parameter.to_local(), start


def _draw_rows(local: Tensor, std: float, stream: str, *, offset: int, total_rows: int) -> None:
    """Fills `local` [R, ...], rows offset.. of a parameter of `total_rows`, from the random stream named `stream`."""
    block_rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(local.shape[1:])))
    end = offset + local.shape[0]
    for block in range(offset // block_rows, -(-end // block_rows)):
        first = block * block_rows
        # The whole block, whatever part of it is wanted here: values may depend on how many are drawn at once.
        values = torch.empty(min(block_rows, total_rows - first), *local.shape[1:], dtype=torch.float32)
        values.normal_(0.0, std, generator=_generator(stream, block))
        start, stop = max(offset, first), min(end, first + values.shape[0])
        local[start - offset : stop - offset].copy_(values[start - first : stop - first])


def _generator(stream: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{stream}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _fill_any_sharding(parameter: Tensor, std: float, stream: str) -> None:
    """As _draw_rows for a DTensor split along other dimensions: every rank draws the whole and keeps its part."""
    assert isinstance(parameter, DTensor)
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    _draw_rows(whole, std, stream, offset=0, total_rows=whole.shape[0])
    whole = whole.to(parameter.device)
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(mine.to_local())
