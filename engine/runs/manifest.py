"""MANIFEST.json: what a committed checkpoint says of itself. Standard library only.

    {"format": 1, "save_id": "...", "step": 1200, "saved_at": "...",
     "files":   {"rank00000.safetensors": {"bytes": ..., "sha256": "...", "storage": "..."}},
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64],
                                       "chunks": [{"offsets": [0], "sizes": [32], "file": "...", "key": "..."}]}},
     "state":   {"samples": ..., ...}, "facts": {"run_id": ...},
     "sha256":  of all the above as JSON without spaces, keys sorted}

Everything about tensors is here and nothing is pickled, so reading a checkpoint never runs code that it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from engine.config.errors import BurstError
from engine.config.schema import to_plain
from engine.runs.files import finite, hash_json, require_json_object

FORMAT = 1
MANIFEST_FILE = "MANIFEST.json"
_NAME = re.compile(r"rank\d{5}\.safetensors")
_SAVE_ID = re.compile(r"[0-9a-f]{1,64}")
_FEW = 64  # chunks of a tensor whose overlaps are looked for pair by pair


class CheckpointError(BurstError):
    """A checkpoint cannot be written, read or trusted."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins, its shape, and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.sizes)

    def common(self, other: Chunk) -> tuple[range, ...] | None:
        """The numbers of the whole tensor, by dimension, that lie in another chunk of it too, or None."""
        ours, theirs = (zip(one.offsets, one.sizes, strict=True) for one in (self, other))
        sides = [
            range(max(begin, start), min(begin + size, start + length))
            for (begin, size), (start, length) in zip(ours, theirs, strict=True)
        ]
        return tuple(sides) if all(sides) else None


@dataclass(frozen=True)
class TensorFacts:
    """A whole tensor: dtype as torch names it without its prefix, shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileFacts:
    """A file of the checkpoint; storage: id of the disk it was written to, for nodes that share none."""

    bytes: int
    sha256: str
    storage: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint. save_id: of this very save; state: JSON values beside the tensors; facts: for people."""

    step: int
    save_id: str
    saved_at: str
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorFacts]
    state: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the hash that shows any later change."""
        document = finite({"format": FORMAT, **to_plain(self)})
        return {**document, "sha256": hash_json(document)}

    def whole(self, name: str) -> int:
        """A whole number of `state`. Raises CheckpointError when there is none."""
        value = self.state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"the checkpoint of step {self.step} does not say its {name}: got {value!r}")
        return value

    def problems(self) -> Iterator[str]:
        """What is wrong with it in itself: names that lead elsewhere, parts of tensors that are missing or double."""
        if not _SAVE_ID.fullmatch(self.save_id):  # it names a folder while files are fetched
            yield f"{self.save_id!r} is no id of a save"
        yield from (f"{name!r} is no name of a checkpoint's file" for name in self.files if not _NAME.fullmatch(name))
        for name, tensor in self.tensors.items():
            if problem := _tensor_problem(tensor, self.files):
                yield f"{name}: {problem}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
    path = folder / MANIFEST_FILE
    return manifest_from_dict(require_json_object(path, "the manifest of a whole save", CheckpointError), str(path))


def manifest_from_dict(document: Mapping[str, Any], where: str) -> Manifest:
    """The manifest that `document` spells. Raises CheckpointError, naming `where`, for anything else."""
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{where} is of format {document.get('format')!r}; this version reads {FORMAT}")
    if document.get("sha256") != hash_json({key: value for key, value in document.items() if key != "sha256"}):
        raise CheckpointError(f"{where} is not what was written: its own SHA-256 is another")
    try:
        manifest = Manifest(
            step=int(document["step"]),
            save_id=document["save_id"],
            saved_at=document["saved_at"],
            files={name: FileFacts(**facts) for name, facts in document["files"].items()},
            tensors={name: _tensor_facts(facts) for name, facts in document["tensors"].items()},
            state=dict(document["state"]),
            facts=dict(document["facts"]),
        )
        problem = next(manifest.problems(), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: {error!r}") from error
    if problem is not None:
        raise CheckpointError(f"{where} is damaged: {problem}")
    return manifest


def _tensor_facts(facts: Mapping[str, Any]) -> TensorFacts:
    chunks = tuple(
        Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), chunk["file"], chunk["key"]) for chunk in facts["chunks"]
    )
    return TensorFacts(facts["dtype"], tuple(facts["shape"]), chunks)


def _tensor_problem(tensor: TensorFacts, files: Mapping[str, FileFacts]) -> str | None:
    for chunk in tensor.chunks:
        if chunk.file not in files:
            return f"a part lies in {chunk.file}, which is no file of this checkpoint"
        if len(chunk.offsets) != len(tensor.shape) or len(chunk.sizes) != len(tensor.shape):
            return f"a part has another number of dimensions than {list(tensor.shape)}"
        sides = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if not all(0 <= begin <= begin + length <= whole for begin, length, whole in sides):
            return f"a part reaches beyond {list(tensor.shape)}"
    if sum(chunk.elements for chunk in tensor.chunks) != math.prod(tensor.shape):
        return "its parts do not make up the whole"
    if len(tensor.chunks) <= _FEW and any(
        one.common(other) is not None for one, other in combinations(tensor.chunks, 2)
    ):
        return "two of its parts overlap"
    return None
