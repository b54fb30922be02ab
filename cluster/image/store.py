"""Images as this machine keeps them for pushing: packed layers by diff id, so that an image is exported only once.

    layers/DIFF/zstd, gzip, none   the layer in this packing
    layers/DIFF/facts.json         its size, and sha256 and size of each packing that is there
    images/IDENTITY.json           settings and the list of layers

Files come into being under a temporary name; whatever is interrupted, what has its name is whole.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from cluster.errors import ClusterError
from cluster.image.archive import SavedImage, read_archive

_LEVEL = 3  # about 300 MB/s per core; higher levels win little on images
_GZIP_LEVEL = 1
_PIECE_BYTES = 1 << 20
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Packing:
    """One packed form of a layer: sha256 and size of the packed bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Layer:
    """One layer: `packings` by encoding ("zstd", "gzip", "none")."""

    diff_id: str
    unpacked_bytes: int
    packings: dict[str, Packing]


@dataclass(frozen=True)
class StoredImage:
    """An image that can be pushed. layers: every different one once; diff_ids: from the bottom up, perhaps repeated."""

    name: str
    identity: str
    saved: SavedImage
    layers: tuple[Layer, ...]

    @property
    def unpacked_bytes(self) -> int:
        """Size of all layers, unpacked."""
        return sum(layer.unpacked_bytes for layer in self.layers)


def default_store() -> Store:
    """The store of this user: ~/.cache/burst/images, or below XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Store((Path(cache) if cache else Path.home() / ".cache") / "burst" / "images")


class Store:
    """See the module's description; `root` is created when something is put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, identity: str, name: str) -> StoredImage | None:
        """The image, if all of its layers are here in whole."""
        record = _read_json(self.root / "images" / f"{identity}.json")
        if record is None:
            return None
        saved = SavedImage(base64.b64decode(record["config"]), tuple(record["diff_ids"]))
        layers = [self._layer(diff_id) for diff_id in dict.fromkeys(saved.diff_ids)]
        if any(layer is None or "zstd" not in layer.packings for layer in layers):
            return None
        return StoredImage(name, identity, saved, tuple(layer for layer in layers if layer is not None))

    def add(
        self, stream: IO[bytes], identity: str, name: str, on_bytes: Callable[[int], None] = lambda size: None
    ) -> StoredImage:
        """The image that `docker save` writes into `stream`, now stored; `on_bytes` hears how much was read.

        Layers that got here before an interruption stay, and are not stored twice.
        """
        with self._locked():
            saved = read_archive(stream, lambda pieces, size: self._add_layer(_counted(pieces, on_bytes), size))
            record = {"config": base64.b64encode(saved.config).decode(), "diff_ids": saved.diff_ids}
            _write_json(self.root / "images" / f"{identity}.json", record)
        image = self.find(identity, name)
        if image is None:
            raise ClusterError(f"{self.root}: the image was stored, but is not there: is something else cleaning up?")
        return image

    def pack(self, image: StoredImage, encoding: str) -> StoredImage:
        """The image with all layers in `encoding`, too."""
        with self._locked():
            for layer in image.layers:
                if encoding not in layer.packings:
                    self._repack(layer, encoding)
        found = self.find(image.identity, image.name)
        if found is None:
            raise ClusterError(f"{self.root}: a layer vanished while it was packed anew; run the command again")
        return found

    def path(self, layer: Layer, encoding: str) -> Path:
        """The file of a packed layer."""
        return self._folder(layer.diff_id) / encoding

    def verify(self, layer: Layer, encoding: str) -> bool:
        """Whether the file still has the hash it was stored with; a wrong one is removed, so that it is made anew."""
        digest = hashlib.sha256()
        with contextlib.suppress(FileNotFoundError), self.path(layer, encoding).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() == layer.packings[encoding].sha256:
            return True
        shutil.rmtree(self._folder(layer.diff_id), ignore_errors=True)
        return False

    def prune(self, *, dry_run: bool) -> tuple[int, int]:
        """(files, bytes) that were, or would be, removed: everything that this class ever wrote, nothing else."""
        folders = [path for path in (self.root / "layers").glob("*") if _HASH.fullmatch(path.name)]
        files = [path for folder in folders for path in folder.iterdir()]
        files += [path for path in (self.root / "images").glob("*.json") if _HASH.fullmatch(path.stem)]
        files += (self.root / "layers").glob(".new-*")
        total = sum(path.stat().st_size for path in files)
        if not dry_run and files:
            with self._locked():
                for path in files:
                    path.unlink(missing_ok=True)
                for folder in [*folders, self.root / "layers", self.root / "images"]:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
        return len(files), total

    def _folder(self, diff_id: str) -> Path:
        name = diff_id.removeprefix("sha256:")
        if not _HASH.fullmatch(name):
            raise ClusterError(f"not the id of a layer: {diff_id[:80]!r}")
        return self.root / "layers" / name

    def _layer(self, diff_id: str) -> Layer | None:
        folder = self._folder(diff_id)
        facts = _read_json(folder / "facts.json")
        if facts is None:
            return None
        packings = {
            encoding: Packing(row["sha256"], row["size"])
            for encoding, row in facts["packings"].items()
            if _size(folder / encoding) == row["size"]
        }
        return Layer(diff_id, facts["unpacked_bytes"], packings)

    def _add_layer(self, pieces: Iterator[bytes], size: int | None) -> str:
        packer = zstandard.ZstdCompressor(level=_LEVEL, threads=-1).compressobj(size=-1 if size is None else size)
        digest, unpacked = hashlib.sha256(), 0
        with self._new_file() as (file, temporary):
            write = _Hashed(file)
            for piece in pieces:
                digest.update(piece)
                unpacked += len(piece)
                write(packer.compress(piece))
            write(packer.flush())
            diff_id = f"sha256:{digest.hexdigest()}"
            known = self._layer(diff_id)
            if known is None or "zstd" not in known.packings:
                self._keep(file, temporary, Layer(diff_id, unpacked, {"zstd": write.packing()}), "zstd")
        return diff_id

    def _repack(self, layer: Layer, encoding: str) -> None:
        packer: Any = zlib.compressobj(_GZIP_LEVEL, wbits=31) if encoding == "gzip" else None
        with self.path(layer, "zstd").open("rb") as packed, self._new_file() as (file, temporary):
            write = _Hashed(file)
            for piece in zstandard.ZstdDecompressor().read_to_iter(packed, write_size=_PIECE_BYTES):
                write(piece if packer is None else packer.compress(piece))
            write(b"" if packer is None else packer.flush())
            packings = {**layer.packings, encoding: write.packing()}
            self._keep(file, temporary, Layer(layer.diff_id, layer.unpacked_bytes, packings), encoding)

    def _keep(self, file: IO[bytes], temporary: Path, layer: Layer, encoding: str) -> None:
        file.flush()
        os.fsync(file.fileno())
        folder = self._folder(layer.diff_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.replace(folder / encoding)
        rows = {name: {"sha256": row.sha256, "size": row.size} for name, row in layer.packings.items()}
        _write_json(folder / "facts.json", {"unpacked_bytes": layer.unpacked_bytes, "packings": rows})

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[tuple[IO[bytes], Path]]:
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self.root / "layers")
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file, Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time; clears away what killed ones left."""
        for folder in (self.root, self.root / "layers", self.root / "images"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in (self.root / "layers").glob(".new-*"):
                left.unlink()
            yield


class _Hashed:
    """Writes, and knows hash and size of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._size = file, hashlib.sha256(), 0

    def __call__(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)
        self._file.write(data)

    def packing(self) -> Packing:
        return Packing(self._digest.hexdigest(), self._size)


def _counted(pieces: Iterator[bytes], on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        on_bytes(len(piece))
        yield piece


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)
