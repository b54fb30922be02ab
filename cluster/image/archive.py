"""What the engine saves, as blobs of a registry: `docker save` is read once, as a stream, and packed on the way.

classic   ID/layer.tar (or HASH.tar) per layer, HASH.json (settings), manifest.json; a layer may be a link to another
OCI       blobs/sha256/HASH for everything, layers perhaps packed already, index.json, and manifest.json, too
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import zstandard

from cluster.errors import ClusterError
from cluster.image.node.registry import Blob

Packing = Literal["zstd", "none"]
_MAX_DOCUMENT_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_HEAD_BYTES = 512
_LEVEL = 3  # about 300 MB/s per core; higher ones win little on images
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class PackedImage:
    """All that a registry needs: blobs by digest, one of them the manifest."""

    blobs: dict[str, Blob]
    manifest: str

    @property
    def size_bytes(self) -> int:
        """What a node gets that has nothing of it."""
        return sum(blob.have for blob in self.blobs.values())


def pack_archive(stream: IO[bytes], packing: Packing) -> PackedImage:
    """The image in the tar `stream`, its layers packed. Raises ClusterError when it is damaged or incomplete."""
    documents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    layers: dict[str, dict[str, Any]] = {}
    blobs: dict[str, Blob] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.issym():
                    links[member.name] = posixpath.normpath(f"{posixpath.dirname(member.name)}/{member.linkname}")
                if not member.isreg():
                    continue
                reader = archive.extractfile(member)
                assert reader is not None
                head = reader.read(_HEAD_BYTES)
                if member.size <= _MAX_DOCUMENT_BYTES and head[:1] in (b"{", b"[") and head[257:262] != b"ustar":
                    documents[member.name] = head + reader.read()
                elif member.name.endswith(".tar") or member.name.startswith("blobs/sha256/"):
                    layers[member.name] = _add(blobs, *_packed(head, reader, packing))
    except (tarfile.TarError, EOFError, zstandard.ZstdError) as error:
        raise ClusterError(f"the archive that the engine wrote is damaged: {error}") from error
    config, names = _image(documents)
    try:
        rows = [layers[links.get(name, name)] for name in names]
    except KeyError as error:
        raise ClusterError(f"the engine left a layer out of its archive: {error}") from error
    settings = _add(blobs, _CONFIG, [config])
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": settings, "layers": rows}
    return PackedImage(blobs, _add(blobs, _MANIFEST, [json.dumps(manifest).encode()])["digest"])


def _image(documents: dict[str, bytes]) -> tuple[bytes, list[str]]:
    """The settings of the one image, byte by byte, and the names of its layers from the bottom up."""
    try:
        (row,) = json.loads(documents["manifest.json"])
        return documents[row["Config"]], [str(name) for name in row["Layers"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterError("manifest.json in the engine's archive does not describe exactly one image") from error


def _packed(head: bytes, reader: IO[bytes], packing: Packing) -> tuple[str, Iterable[bytes]]:
    """(media type, bytes) of a layer in `packing`; one that is gzip stays as it is, as every engine takes it."""
    there = "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head[:4] == b"\x28\xb5\x2f\xfd" else "none"
    pieces: Iterable[bytes] = itertools.chain([head], iter(functools.partial(reader.read, _READ_BYTES), b""))
    if there == "zstd" and packing == "none":
        pieces, there = map(zstandard.ZstdDecompressor().decompressobj().decompress, pieces), "none"
    if there == "none" and packing == "zstd":
        pieces, there = _pack(pieces), "zstd"
    return _LAYER + ("" if there == "none" else f"+{there}"), pieces


def _pack(pieces: Iterable[bytes]) -> Iterator[bytes]:
    # Without the size in its head: the same layer gives the same bytes, however the engine hands it over.
    packer = zstandard.ZstdCompressor(level=_LEVEL, threads=-1).compressobj()
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _add(blobs: dict[str, Blob], media_type: str, pieces: Iterable[bytes]) -> dict[str, Any]:
    """What a manifest says of a blob, which is one of `blobs` now."""
    blob, digest = Blob(media_type), hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        blob.append(piece)
    blob.size = blob.have
    name = f"sha256:{digest.hexdigest()}"
    blobs.setdefault(name, blob)
    return {"mediaType": media_type, "digest": name, "size": blob.size}
