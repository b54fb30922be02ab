"""Checkpoint folders: written under a temporary name, committed by a rename, verified before use.

checkpoints/
    step-00001200/             committed: files and MANIFEST.json
    step-00001300.tmp-<id>/    being written, or left by a save that died; never read
    step-00001100.old-<id>/    replaced by a new save of the same step, until that is committed
    step-00001000.bad-<id>/    found damaged and put aside, with the reason in WHY
    fetched-<id>/              files of another node's disk, while they are read
    storage                    id of this disk, with which nodes detect whether they share it

MANIFEST.json describes a committed checkpoint:

    {"format": 1, "save_id": "...", "step": 1200, "saved_at": "...",
     "files":   {"rank00000.safetensors": {"bytes": ..., "sha256": "...", "storage": "..."}},
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64],
                                       "chunks": [{"offsets": [0], "sizes": [32], "file": "...", "key": "..."}]}},
     "state":   {"samples": ..., ...}, "facts": {"run_id": ...},
     "sha256":  of all the above as JSON without spaces, keys sorted}

Everything about tensors is there and nothing is pickled, so reading a checkpoint never runs code that it holds.
Standard library only.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from engine.config.errors import BurstError, ConfigError
from engine.config.schema import hash_json, to_plain
from engine.config.settings import CheckpointConfig, load_config
from engine.runs.files import finite, hash_file, home_path, replace_json, require_json_object, sync

# --- the manifest -----------------------------------------------------------------------------------------------------


FORMAT = 1
MANIFEST_FILE = "MANIFEST.json"
_NAME = re.compile(r"rank\d{5}\.safetensors")
_SAVE_ID = re.compile(r"[0-9a-f]{1,64}")
_FEW = 64  # chunks of a tensor whose overlaps are looked for pair by pair


class CheckpointError(BurstError):
    """A checkpoint cannot be written, read or verified."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offsets, its shape, and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def common(self, other: Chunk) -> tuple[range, ...] | None:
        """Return the intersection with another chunk as a range per dimension of the tensor, or None if empty."""
        ours, theirs = (zip(item.offsets, item.sizes, strict=True) for item in (self, other))
        sides = [
            range(max(begin, start), min(begin + size, start + length))
            for (begin, size), (start, length) in zip(ours, theirs, strict=True)
        ]
        return tuple(sides) if all(sides) else None


@dataclass(frozen=True)
class TensorFacts:
    """A tensor: dtype (torch's name without prefix), shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileFacts:
    """A file of the checkpoint; storage: id of the disk it was written to, for nodes that do not share one."""

    bytes: int
    sha256: str
    storage: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint. save_id: unique per save; state: JSON values beside the tensors; facts: for display."""

    step: int
    save_id: str
    saved_at: str
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorFacts]
    state: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with a hash that reveals later changes."""
        document = finite({"format": FORMAT, **to_plain(self)})
        return {**document, "sha256": hash_json(document)}

    def whole(self, name: str) -> int:
        """Return an integer of `state`. Raises CheckpointError if there is none."""
        value = self.state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"the checkpoint of step {self.step} has no valid {name}: got {value!r}")
        return value

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies: file names outside the folder, parts of tensors that are missing or overlap."""
        if not _SAVE_ID.fullmatch(self.save_id):  # it names a folder while files are fetched
            yield f"{self.save_id!r} is no id of a save"
        yield from (f"{name!r} is no name of a checkpoint's file" for name in self.files if not _NAME.fullmatch(name))
        for name, tensor in self.tensors.items():
            if problem := _tensor_problem(tensor, self.files):
                yield f"{name}: {problem}"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`. Raises CheckpointError if it is missing or damaged."""
    path = folder / MANIFEST_FILE
    return manifest_from_dict(require_json_object(path, "the manifest of a whole save", CheckpointError), str(path))


def manifest_from_dict(document: Mapping[str, Any], where: str) -> Manifest:
    """Build the manifest of `document`. Raises CheckpointError, naming `where`, for anything else."""
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{where} is of format {document.get('format')!r}; this version reads {FORMAT}")
    if document.get("sha256") != hash_json({key: value for key, value in document.items() if key != "sha256"}):
        raise CheckpointError(f"{where} was changed after it was written: its SHA-256 differs")
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
            return f"a part is in {chunk.file}, which is no file of this checkpoint"
        if len(chunk.offsets) != len(tensor.shape) or len(chunk.sizes) != len(tensor.shape):
            return f"a part has another number of dimensions than {list(tensor.shape)}"
        sides = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if not all(0 <= begin <= begin + length <= whole for begin, length, whole in sides):
            return f"a part reaches beyond {list(tensor.shape)}"
    if sum(chunk.elements for chunk in tensor.chunks) != math.prod(tensor.shape):
        return "its parts do not make up the whole"
    if len(tensor.chunks) <= _FEW and any(
        item.common(other) is not None for item, other in combinations(tensor.chunks, 2)
    ):
        return "two of its parts overlap"
    return None


# --- folders ----------------------------------------------------------------------------------------------------------


STORAGE_FILE = "storage"
_COMMITTED = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"(step-\d{8,})\.old-[0-9a-f]+")
_LEFTOVER = re.compile(r"(step-\d{8,}(\.(tmp|old|gone)-[0-9a-f]+)+|fetched-[0-9a-f]+)")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, not verified."""

    step: int
    path: Path

    @classmethod
    def of(cls, root: Path, step: int) -> Checkpoint:
        """Return the checkpoint of a step in `root`, whether or not it exists."""
        return cls(step, root / f"step-{step:08d}")


def new_folder(root: Path, step: int, save_id: str) -> Path:
    """Create a temporary folder for the checkpoint of `step`; save_id: hex digits, unique per save."""
    path = Checkpoint.of(root, step).path.with_suffix(f".tmp-{save_id}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint under {root}: {error.strerror}") from error
    return path


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Commit the folder `temporary` as the checkpoint of its step, by a rename. Raises OSError.

    An older checkpoint of the same step stays until then, under a name by which `recover` finds it.
    """
    replace_json(temporary / MANIFEST_FILE, manifest.to_dict())
    sync(temporary)
    target = Checkpoint.of(temporary.parent, manifest.step).path
    replaced: Path | None = None
    if target.exists():
        replaced = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
        target.rename(replaced)
    temporary.rename(target)
    sync(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def recover(root: Path) -> None:
    """Clean up after killed saves and removals in `root`; no save may be in progress there."""
    for path in _children(root):
        if found := _REPLACED.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if not (root / found[1]).exists():
                    path.rename(root / found[1])
    for path in _children(root):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Return the committed checkpoints in `root`, newest first, not verified."""
    found = [(match, path) for path in _children(root) if (match := _COMMITTED.fullmatch(path.name))]
    return sorted((Checkpoint(int(match[1]), path) for match, path in found), key=lambda item: -item.step)


def open_checkpoint(checkpoint: Checkpoint) -> Manifest:
    """Read its manifest. Raises CheckpointError if it is damaged or of another step."""
    manifest = read_manifest(checkpoint.path)
    if manifest.step != checkpoint.step:
        raise CheckpointError(f"{checkpoint.path} holds step {manifest.step}")
    return manifest


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Read these files (None: all) completely and compare them with the manifest; `advance` gets the bytes read.

    Raises CheckpointError for the first that differs.
    """
    for name in sorted(manifest.files) if names is None else names:
        path, facts = folder / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != facts.bytes:
                raise CheckpointError(f"{path} has {size:,} bytes, {facts.bytes:,} were written")
            if hash_file(path) != facts.sha256:
                raise CheckpointError(f"{path} was changed after it was written: its SHA-256 differs")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        advance(facts.bytes)


def file_facts(path: Path, storage: str) -> FileFacts:
    """Return the manifest's entry for the file at `path`. Raises OSError."""
    return FileFacts(path.stat().st_size, hash_file(path), storage)


def put_aside(checkpoint: Checkpoint, why: str) -> Path:
    """Rename a damaged checkpoint so that it is not used again, and write the reason into it; return the new path.

    Raises CheckpointError when it cannot be renamed, as on a read-only disk.
    """
    target = checkpoint.path.with_name(f"{checkpoint.path.name}.bad-{secrets.token_hex(4)}")
    try:
        checkpoint.path.rename(target)
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path} is damaged and cannot be put aside: {error.strerror}") from error
    with contextlib.suppress(OSError):
        (target / "WHY").write_text(why + "\n", encoding="utf-8")
    return target


def superfluous(
    steps: Sequence[int], *, keep_last: int, keep_every: int | None = None, protected: Iterable[int] = ()
) -> list[int]:
    """Return the committed `steps` to delete: all but the newest `keep_last`, every multiple of `keep_every` steps
    and `protected` ones.
    """
    newest = sorted(steps)[-keep_last:] if keep_last else []
    kept = {*newest, *protected}
    return [step for step in sorted(steps) if step not in kept and (keep_every is None or step % keep_every)]


def checkpoints_folder(settings: CheckpointConfig, run_path: Path) -> Path:
    """Return the folder of the checkpoints of the run in `run_path`."""
    folder = settings.folder
    return run_path / "checkpoints" if folder is None else home_path(folder) / run_path.name


def checkpoints_of(run_path: Path) -> Path:
    """Return the folder of a run's checkpoints on this machine: that of its config.yaml, or the run folder if there are
    only those that `burst checkpoint fetch` brought. Raises ConfigError when config.yaml cannot be read.
    """
    config = run_path / "config.yaml"
    settings = load_config(config).train.checkpoint if config.exists() else CheckpointConfig()
    chosen, own = checkpoints_folder(settings, run_path), run_path / "checkpoints"
    return own if list_checkpoints(own) and not list_checkpoints(chosen) else chosen


def read_storage_id(root: Path) -> str:
    """Return the id of the disk of `root` that `storage_id` wrote; empty if it did not."""
    try:
        return (root / STORAGE_FILE).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def storage_id(root: Path) -> str:
    """Return the id of the disk of `root`, created if needed, equal for all that see the folder. Raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = root / STORAGE_FILE
    fresh = path.with_name(f"{STORAGE_FILE}.tmp-{secrets.token_hex(8)}")
    if not path.exists():
        fresh.write_text(secrets.token_hex(16), encoding="ascii")
        sync(fresh)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)  # appears whole, and only if there is none
        fresh.unlink()
        sync(root)
    return path.read_text(encoding="ascii")


def _children(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def check_steps_left(step: int, source: str | Path, steps: int) -> None:
    """Raise ConfigError if a run of `steps` has no step left after the checkpoint of `step` in `source`."""
    if step >= steps:
        raise ConfigError(
            f"train.checkpoint.resume_from={source} is at step {step}, so train.steps={steps} leaves nothing to do: "
            f"steps are counted from the start of the first run. Set train.steps to more than {step}, or evaluate the "
            "weights with `burst eval`"
        )


def find_source(source: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints that a path names, and the step (None: the newest). Raises CheckpointError."""
    for checkpoint in list_checkpoints(source.parent):
        if checkpoint.path == source:
            return source.parent, checkpoint.step
    roots = [source / "checkpoints", source]
    with contextlib.suppress(ConfigError):  # of a run whose settings are of another version
        roots.insert(0, checkpoints_of(source))
    for root in roots:
        if list_checkpoints(root):
            return root, None
    raise CheckpointError(f"{source} holds no checkpoint: expected a run folder or one of its checkpoints")
