"""MANIFEST.json: what a committed checkpoint says of itself. Standard library only.

    {"format": 1, "save_id": "...", "step": 1200, "saved_at": "...",
     "files":   {"rank00000.safetensors": {"bytes": ..., "sha256": "...", "storage": "..."}},
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64],
                                       "chunks": [{"offsets": [0], "sizes": [32], "file": "...", "key": "..."}]}},
     "state":   {"position": {...}, ...}, "facts": {"config_fingerprint": ..., "versions": {...}, "mesh": {...}},
     "sha256":  of all the above as JSON without spaces, keys sorted}

Everything about tensors is here and nothing is pickled, so reading a checkpoint never runs code that it holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from engine.errors import BurstError
from engine.run.records import read_json_object

FORMAT = 1
MANIFEST_FILE = "MANIFEST.json"
_FILE_NAME = re.compile(r"rank\d{5}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
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
        document = self._content()
        return {**document, "sha256": content_hash(document)}

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "save_id": self.save_id,
            "step": self.step,
            "saved_at": self.saved_at,
            "files": {name: vars(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "chunks": [
                        {
                            "offsets": list(chunk.offsets),
                            "sizes": list(chunk.sizes),
                            "file": chunk.file,
                            "key": chunk.key,
                        }
                        for chunk in tensor.chunks
                    ],
                }
                for name, tensor in self.tensors.items()
            },
            "state": dict(self.state),
            "facts": dict(self.facts),
        }

    def whole(self, name: str) -> int:
        """A whole number of `state`. Raises CheckpointError when there is none."""
        value = self.state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"the checkpoint of step {self.step} does not say its {name}: got {value!r}")
        return value

    def problems(self) -> list[str]:
        """What is wrong with it in itself: parts of tensors that are missing, double, or in files it does not name."""
        found = []
        for name, tensor in self.tensors.items():
            found += [f"{name}: {text}" for text in _tensor_problems(tensor, self.files)]
        return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        document = read_json_object(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if document is None:
        raise CheckpointError(f"{folder} has no {MANIFEST_FILE}: its save did not end")
    return manifest_from_dict(document, str(path))


def manifest_from_dict(document: Mapping[str, Any], where: str) -> Manifest:
    """The manifest that `document` spells. Raises CheckpointError, naming `where`, for anything else."""
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{where} is of format {document.get('format')!r}; this version reads {FORMAT}")
    if document.get("sha256") != content_hash({key: value for key, value in document.items() if key != "sha256"}):
        raise CheckpointError(f"{where} is not what was written: its own SHA-256 is another")
    try:
        manifest = Manifest(
            step=_whole(document["step"]),
            save_id=_save_id(document["save_id"]),
            saved_at=_text(document["saved_at"]),
            files={_file_name(name): _file_facts(facts) for name, facts in _table(document["files"]).items()},
            tensors={_text(name): _tensor_facts(facts) for name, facts in _table(document["tensors"]).items()},
            state=_table(document["state"]),
            facts=_table(document["facts"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: {error!r}") from error
    if problems := manifest.problems():
        raise CheckpointError(f"{where} is damaged: {problems[0]}")
    return manifest


def content_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, however it is laid out in its file."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tensor_problems(tensor: TensorFacts, files: Mapping[str, FileFacts]) -> list[str]:
    for chunk in tensor.chunks:
        if chunk.file not in files:
            return [f"a part lies in {chunk.file}, which is no file of this checkpoint"]
        if len(chunk.offsets) != len(tensor.shape) or len(chunk.sizes) != len(tensor.shape):
            return [f"a part has another number of dimensions than {list(tensor.shape)}"]
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            return [f"a part reaches beyond {list(tensor.shape)}"]
    if sum(chunk.elements for chunk in tensor.chunks) != math.prod(tensor.shape):
        return ["its parts do not make up the whole"]
    if len(tensor.chunks) <= _FEW and any(_overlap(one, other) for one, other in combinations(tensor.chunks, 2)):
        return ["two of its parts overlap"]
    return []


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(begin < start + length and start < begin + size for begin, size, start, length in sides)


def _file_facts(value: Any) -> FileFacts:
    facts = _table(value)
    if not _HASH.fullmatch(_text(facts["sha256"])):
        raise ValueError(f"{facts['sha256']!r} is no SHA-256")
    return FileFacts(_whole(facts["bytes"]), facts["sha256"], _text(facts["storage"]))


def _tensor_facts(value: Any) -> TensorFacts:
    facts = _table(value)
    chunks = tuple(_chunk(chunk) for chunk in _list(facts["chunks"]))
    return TensorFacts(_text(facts["dtype"]), _sizes(facts["shape"]), chunks)


def _chunk(value: Any) -> Chunk:
    facts = _table(value)
    return Chunk(_sizes(facts["offsets"]), _sizes(facts["sizes"]), _file_name(facts["file"]), _text(facts["key"]))


def _save_id(value: Any) -> str:
    """It names a folder while files are fetched, so it must not be a path."""
    if not isinstance(value, str) or not _SAVE_ID.fullmatch(value):
        raise ValueError(f"{value!r} is no id of a save")
    return value


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name of a checkpoint's file")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(_whole(size) for size in _list(value))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no table")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value
