"""Reading `docker save`: both layouts, as a stream, so that an image never lies unpacked on this machine.

classic   ID/layer.tar per layer, HASH.json (settings), manifest.json
OCI       blobs/sha256/HASH for everything (layers perhaps compressed), index.json, mostly manifest.json, too
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from cluster.errors import ClusterError

MAX_DOCUMENT_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 512
_DOCUMENT_NAMES = ("manifest.json", "index.json", "oci-layout", "repositories")

# (pieces of the uncompressed layer, its size or None) -> its diff id
AddLayer = Callable[[Iterator[bytes], int | None], str]


class ArchiveError(ClusterError):
    """What the engine saved is no image archive that burst understands."""


@dataclass(frozen=True)
class SavedImage:
    """config: the settings, byte by byte; their hash is the image id of the classic store."""

    config: bytes
    diff_ids: tuple[str, ...]

    @property
    def config_name(self) -> str:
        """HASH.json."""
        return f"{hashlib.sha256(self.config).hexdigest()}.json"


def read_archive(stream: IO[bytes], add_layer: AddLayer) -> SavedImage:
    """The image in the tar `stream`; every layer goes through `add_layer` once, in the order of the archive.

    Raises ArchiveError when it is damaged, or when layers that its settings name are not in it.
    """
    documents: dict[str, bytes] = {}
    found: set[str] = set()
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                reader = archive.extractfile(member) if member.isreg() else None
                if reader is None:
                    continue
                head = reader.read(_HEAD_BYTES)
                if _is_document(member, head):
                    documents[member.name] = head + reader.read()
                elif member.name.endswith("/layer.tar") or member.name.startswith("blobs/sha256/"):
                    pieces = _pieces(head, reader)
                    packed = _compression(head)
                    found.add(add_layer(_unpack(pieces, packed), None if packed else member.size))
    except (tarfile.TarError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ArchiveError(f"the archive that the engine wrote is damaged: {error}") from error
    config = _config(documents)
    diff_ids = tuple(_parse(config, "settings").get("rootfs", {}).get("diff_ids") or ())
    missing = [diff_id for diff_id in diff_ids if diff_id not in found]
    if missing:
        raise ArchiveError(f"the engine left {len(missing)} of {len(diff_ids)} layers out of its archive: {missing[0]}")
    return SavedImage(config, diff_ids)


def _is_document(member: tarfile.TarInfo, head: bytes) -> bool:
    if member.size > MAX_DOCUMENT_BYTES:
        return False
    name = member.name
    if name in _DOCUMENT_NAMES or ("/" not in name and name.endswith(".json")):
        return True
    return name.startswith("blobs/") and head[257:262] != b"ustar" and head.lstrip()[:1] == b"{"


def _config(documents: dict[str, bytes]) -> bytes:
    """The settings of the one image."""
    if "manifest.json" in documents:
        rows = _parse(b'{"rows": %b}' % documents["manifest.json"], "manifest.json")["rows"]
        if (
            isinstance(rows, list)
            and len(rows) == 1
            and isinstance(rows[0], dict)
            and rows[0].get("Config") in documents
        ):
            return documents[rows[0]["Config"]]
        raise ArchiveError("manifest.json does not name the settings of exactly one image")
    name = "index.json"
    for _ in range(4):  # an index may lead to an index
        document = _parse(documents.get(name, b""), name)
        if "config" in document:
            return documents.get(_blob_name(document["config"]), b"")
        platforms = [row for row in document.get("manifests", ()) if _blob_name(row) in documents]
        if not platforms:
            break
        name = _blob_name(platforms[0])
    raise ArchiveError("neither manifest.json nor index.json leads to the settings of an image")


def _blob_name(row: Any) -> str:
    return "blobs/" + str(row.get("digest", "")).replace(":", "/")


def _parse(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArchiveError(f"{what} in the engine's archive: {error}") from error
    if not isinstance(value, dict):
        raise ArchiveError(f"{what} in the engine's archive: not a JSON object")
    return value


def _compression(head: bytes) -> str | None:
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    return "zstd" if head[:4] == b"\x28\xb5\x2f\xfd" else None


def _pieces(head: bytes, reader: IO[bytes]) -> Iterator[bytes]:
    yield head
    while piece := reader.read(_PIECE_BYTES):
        yield piece


def _unpack(pieces: Iterator[bytes], packed: str | None) -> Iterator[bytes]:
    if packed is None:
        return pieces
    unpacker: Any = zlib.decompressobj(wbits=31) if packed == "gzip" else zstandard.ZstdDecompressor().decompressobj()
    return (unpacker.decompress(piece) for piece in pieces)
