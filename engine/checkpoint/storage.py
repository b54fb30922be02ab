"""Where torch.distributed.checkpoint puts tensors: one safetensors file per rank, described by MANIFEST.json.

DCP plans who writes and who reads which part, on any mesh; its own storage would pickle the description and, as seen,
trust whatever it finds. This one holds tensors only, so that reading runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from engine.checkpoint.commit import sync_file
from engine.checkpoint.manifest import Chunk, Manifest, TensorFacts


def file_name(rank: int) -> str:
    """The file of a rank in the folder of a checkpoint."""
    return f"rank{rank:05d}.safetensors"


class TensorWriter(StorageWriter):
    """Writes this rank's parts into `folder`; after the save rank 0 knows `tensors`, all parts of all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.tensors: dict[str, TensorFacts] = {}
        self.path = folder / file_name(rank)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

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
            results.append(WriteResult(item.index, tensor.nbytes, (self.path.name, key)))
        save_file(tensors, self.path)
        sync_file(self.path)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: what the manifest says of tensors."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        for name, facts in metadata.state_dict_metadata.items():
            assert isinstance(facts, TensorStorageMetadata)
            chunks = []
            for chunk in facts.chunks:
                file, key = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, key))
            dtype = str(facts.properties.dtype).removeprefix("torch.")
            self.tensors[name] = TensorFacts(dtype, tuple(facts.size), tuple(chunks))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Nobody chooses this writer by an id."""
        return False


class TensorReader(StorageReader):
    """Reads parts of the tensors of `manifest`; `find` gives the paths of the files that this rank needs."""

    def __init__(self, manifest: Manifest, find: Callable[[set[str]], Mapping[str, Path]]) -> None:
        self._manifest, self._find = manifest, find
        self._chunks: Mapping[MetadataIndex, Chunk] = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, facts in manifest.tensors.items()
            for chunk in facts.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP knows of the checkpoint."""
        return Metadata({name: _storage_facts(facts) for name, facts in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Nobody chooses this reader by an id."""
        return False


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
