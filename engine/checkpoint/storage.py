"""Where torch.distributed.checkpoint puts tensors: one safetensors file per rank, described by MANIFEST.json.

DCP plans who writes and who reads which part, on any mesh. Its own storage would pickle the description; its storage
for Hugging Face needs every file at hand, and of each tensor one part per file; both, as seen, trust whatever they
find. This one holds tensors only, so that reading runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from engine.runs.files import sync
from engine.runs.manifest import Chunk, Manifest, TensorFacts


def file_name(rank: int) -> str:
    """The file of a rank in the folder of a checkpoint."""
    return f"rank{rank:05d}.safetensors"


class TensorWriter(FileSystemWriter):
    """Writes this rank's parts into `folder`; after the save rank 0 knows `tensors`, all parts of all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self.tensors: dict[str, TensorFacts] = {}
        self._file = folder / file_name(rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file with all that the plan gives this rank, on the disk when this returns."""
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{item.index.fqn} is no tensor")
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensors[key] = tensor.detach().cpu().contiguous()
            results.append(WriteResult(item.index, tensor.nbytes, (self._file.name, key)))
        save_file(tensors, self._file)
        sync(self._file)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: what the manifest says of tensors."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        for name, facts in metadata.state_dict_metadata.items():
            assert isinstance(facts, TensorStorageMetadata)
            chunks = tuple(
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
                for chunk in facts.chunks
            )
            dtype = str(facts.properties.dtype).removeprefix("torch.")
            self.tensors[name] = TensorFacts(dtype, tuple(facts.size), chunks)


class TensorReader(FileSystemReader):
    """Reads parts of the tensors of `manifest`; `find` gives the paths of the files that this rank needs."""

    def __init__(self, folder: Path, manifest: Manifest, find: Callable[[set[str]], Mapping[str, Path]]) -> None:
        super().__init__(folder)
        self._manifest, self._find = manifest, find
        self._chunks: Mapping[MetadataIndex, Chunk] = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, facts in manifest.tensors.items()
            for chunk in facts.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP knows of the checkpoint."""
        return Metadata({name: _storage_facts(facts) for name, facts in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the manifest says where everything is."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies every part that the plan names to its place."""
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((item, chunk))
        paths = self._find(set(by_file))
        for name, items in by_file.items():
            with safe_open(paths[name], framework="pt") as file:
                for item, chunk in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, chunk, item))
                    planner.commit_tensor(item, target)
        return _done(None)


def _read(file: Any, chunk: Chunk, item: ReadItem) -> Tensor:
    """The box of numbers of `chunk` that `item` wants; nothing else is read."""
    if not chunk.sizes:
        whole: Tensor = file.get_tensor(chunk.key)
        return whole
    box = tuple(slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True))
    part: Tensor = file.get_slice(chunk.key)[box]
    return part


def _storage_facts(facts: TensorFacts) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in facts.chunks]
    properties = TensorProperties(dtype=getattr(torch, facts.dtype))
    return TensorStorageMetadata(properties, torch.Size(facts.shape), chunks)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
