"""Which rank writes and reads which part of a tensor: one safetensors file per rank, on any mesh.

Ranks report the parts that they hold, rank 0 assigns each part to one writer, and MANIFEST.json records the assignment,
which is all that a reader with other ranks needs. The storage of torch.distributed.checkpoint would pickle this
metadata or expect every file to be present, and would trust it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from engine.optim.adamw import local_part
from engine.runs.checkpoints import Chunk, TensorFacts
from engine.runs.files import sync


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the folder of a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def local_parts(tensors: Mapping[str, Tensor], rank: int) -> dict[str, TensorFacts]:
    """Return the part of each tensor that this rank holds, as a chunk of its own file.

    Args:
        tensors: Plain tensors, held whole by every rank, or DTensors.
        rank: Of this process.
    """
    facts = {}
    for name, tensor in tensors.items():
        sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        chunk = Chunk(tuple(offsets), tuple(sizes), file_name(rank), f"{name}@{','.join(map(str, offsets))}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts[name] = TensorFacts(dtype, tuple(tensor.shape), (chunk,) if chunk.elements else ())
    return facts


def share_out(parts_by_rank: Sequence[Mapping[str, TensorFacts]]) -> dict[str, TensorFacts]:
    """Assign every chunk to one writer: of the ranks that hold it, the one with the fewest elements so far.

    Args:
        parts_by_rank: `local_parts` of every rank.

    Returns:
        Every tensor with chunks that cover it once.
    """
    elements: Counter[str] = Counter()  # to be written, by file
    assigned = {}
    for name, facts in parts_by_rank[0].items():
        offers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = {}
        for chunk in (chunk for parts in parts_by_rank for chunk in parts[name].chunks):
            offers.setdefault((chunk.offsets, chunk.sizes), []).append(chunk)
        chosen = []
        for offered in offers.values():
            chosen.append(min(offered, key=lambda chunk: elements[chunk.file]))
            elements[chosen[-1].file] += chosen[-1].elements
        assigned[name] = replace(facts, chunks=tuple(chosen))
    return assigned


def write_parts(folder: Path, rank: int, tensors: Mapping[str, Tensor], chosen: Mapping[str, TensorFacts]) -> None:
    """Write this rank's file and sync it to the disk.

    Args:
        folder: Of the checkpoint.
        rank: Of this process.
        tensors: By name, or this rank's parts of them.
        chosen: Assignment of chunks to files (`share_out`).
    """
    file = folder / file_name(rank)
    parts = {
        chunk.key: local_part(tensors[name].detach()).cpu().contiguous()
        for name, facts in chosen.items()
        for chunk in facts.chunks
        if chunk.file == file.name
    }
    save_file(parts, file)
    sync(file)


def read_parts(
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, TensorFacts],
    find: Callable[[set[str]], Mapping[str, Path]],
) -> None:
    """Fill this rank's parts of `tensors` from files, reading only the slices that it needs.

    Args:
        tensors: Plain tensors or DTensors, written in place.
        saved: Chunks of the saved tensors, by name.
        find: Returns the paths of the given files.
    """
    wanted: dict[str, list[tuple[Tensor, str, tuple[slice, ...]]]] = {}
    for name, facts in local_parts(tensors, 0).items():
        local = local_part(tensors[name].detach())
        for part in facts.chunks:
            for chunk in saved[name].chunks:
                if (box := part.common(chunk)) is not None:
                    target = local[_within(box, part)]
                    wanted.setdefault(chunk.file, []).append((target, chunk.key, _within(box, chunk)))
    paths = find(set(wanted))
    for name, parts in wanted.items():
        with safe_open(paths[name], framework="pt") as file:
            for target, key, place in parts:
                target.copy_(file.get_slice(key)[place] if place else file.get_tensor(key))


def _within(box: Sequence[range], chunk: Chunk) -> tuple[slice, ...]:
    """Return the slices of `chunk` that hold `box`, given in coordinates of the whole tensor."""
    return tuple(slice(side.start - at, side.stop - at) for side, at in zip(box, chunk.offsets, strict=True))


class HostCopies:
    """Reusable copies of this rank's parts in host memory, pinned if there is a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy this rank's parts of `tensors`, the same ones at every call; the next call overwrites the copies."""
        on_gpu = torch.cuda.is_available()
        for name, tensor in tensors.items():
            local = local_part(tensor.detach())
            if name not in self._copies:
                self._copies[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=on_gpu)
            self._copies[name].copy_(local, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return self._copies
