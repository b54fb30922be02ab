"""Who writes and who reads which part of a tensor: one safetensors file per rank, on any mesh.

Ranks say what they hold, rank 0 chooses who writes what, and the choice stands in MANIFEST.json: all that a reader on
other ranks needs. Storage of torch.distributed.checkpoint would pickle that, or have every file at hand, and trust it.
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
    """The file of a rank in the folder of a checkpoint."""
    return f"rank{rank:05d}.safetensors"


def held_parts(tensors: Mapping[str, Tensor], rank: int) -> dict[str, TensorFacts]:
    """What rank `rank`, this one, has of each tensor: its chunk, as if it were the one to write it."""
    found = {}
    for name, tensor in tensors.items():
        sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        chunk = Chunk(tuple(offsets), tuple(sizes), file_name(rank), f"{name}@{','.join(map(str, offsets))}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = TensorFacts(dtype, tuple(tensor.shape), (chunk,) if chunk.elements else ())
    return found


def share_out(held: Sequence[Mapping[str, TensorFacts]]) -> dict[str, TensorFacts]:
    """Whole tensors of what all ranks hold; of several that hold a chunk the one with the least so far writes it."""
    numbers: Counter[str] = Counter()  # to be written, by file
    found = {}
    for name, facts in held[0].items():
        offers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = {}
        for chunk in (chunk for parts in held for chunk in parts[name].chunks):
            offers.setdefault((chunk.offsets, chunk.sizes), []).append(chunk)
        chosen = []
        for offered in offers.values():
            chosen.append(min(offered, key=lambda chunk: numbers[chunk.file]))
            numbers[chosen[-1].file] += chosen[-1].elements
        found[name] = replace(facts, chunks=tuple(chosen))
    return found


def write_parts(folder: Path, rank: int, tensors: Mapping[str, Tensor], chosen: Mapping[str, TensorFacts]) -> None:
    """The file of rank `rank`, this one, on the disk when this returns. tensors: whole ones, or its parts of them."""
    file = folder / file_name(rank)
    own = {
        chunk.key: local_part(tensors[name].detach()).cpu().contiguous()
        for name, facts in chosen.items()
        for chunk in facts.chunks
        if chunk.file == file.name
    }
    save_file(own, file)
    sync(file)


def read_parts(
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, TensorFacts],
    find: Callable[[set[str]], Mapping[str, Path]],
) -> None:
    """Fills this rank's parts of `tensors` from files, of which it reads no more than that; `find` has their paths."""
    wanted: dict[str, list[tuple[Tensor, str, tuple[slice, ...]]]] = {}
    for name, facts in held_parts(tensors, 0).items():
        local = local_part(tensors[name].detach())
        for own in facts.chunks:
            for chunk in saved[name].chunks:
                if (box := own.common(chunk)) is not None:
                    target = local[_within(box, own)]
                    wanted.setdefault(chunk.file, []).append((target, chunk.key, _within(box, chunk)))
    paths = find(set(wanted))
    for name, parts in wanted.items():
        with safe_open(paths[name], framework="pt") as file:
            for target, key, place in parts:
                target.copy_(file.get_slice(key)[place] if place else file.get_tensor(key))


def _within(box: Sequence[range], chunk: Chunk) -> tuple[slice, ...]:
    """Where numbers of a tensor lie in a chunk of it."""
    return tuple(slice(side.start - at, side.stop - at) for side, at in zip(box, chunk.offsets, strict=True))


class HostCopies:
    """Copies of this rank's parts in host memory that are overwritten by the next ones; beside a GPU pinned."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parts as they are now; of the same tensors every time."""
        on_gpu = torch.cuda.is_available()
        for name, tensor in tensors.items():
            local = local_part(tensor.detach())
            if name not in self._held:
                self._held[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=on_gpu)
            self._held[name].copy_(local, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return self._held
