"""What the engine saves, as blobs of a registry: `docker save` is read once, as a stream, and packed on the way.

classic   ID/layer.tar (or HASH.tar) per layer, HASH.json (settings), manifest.json; a layer may be a link to another
OCI       blobs/sha256/HASH for everything, layers perhaps packed already, index.json, and manifest.json, too
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import posixpath
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

import zstandard

from cluster.errors import ClusterError
from cluster.image.engine import Image
from cluster.image.node.registry import CHUNK_BYTES, MANIFEST, Blob
from cluster.remote_text import one_line

Packing = Literal["zstd", "none"]
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_DAMAGES = (tarfile.TarError, EOFError, OSError, zstandard.ZstdError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class PackedImage:
    """All that a registry needs: blobs by digest, one of them the manifest."""

    blobs: dict[str, Blob]
    manifest: str

    @property
    def size_bytes(self) -> int:
        """What a node gets that has nothing of it."""
        return sum(blob.size for blob in self.blobs.values())


def pack_image(command: Sequence[str], image: Image, packing: Packing) -> PackedImage:
    """An image of this machine's engine. Raises ClusterError when the engine cannot save it."""
    # By its id: the name may have moved on to another image since it was looked at.
    words = [*command, "save", image.image_id]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            return pack_archive(process.stdout, packing)
        except _DAMAGES as error:
            process.kill()
            said = one_line(process.stderr.read())
            text = said or f"what the engine saves cannot be packed: {error!r}"
            raise ClusterError(f"cannot export {image.name}: {text}") from error


def pack_archive(stream: IO[bytes], packing: Packing) -> PackedImage:
    """The image in the tar `stream`, its layers packed. Raises one of many errors when it is damaged or incomplete."""
    documents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    layers: dict[str, dict[str, Any]] = {}
    blobs: dict[str, Blob] = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            reader = archive.extractfile(member) if member.isreg() else None
            if isinstance(reader, io.BufferedReader):
                head = reader.peek()
                if head[:1] in (b"{", b"[") and head[257:262] != b"ustar":
                    documents[member.name] = reader.read()
                else:
                    layers[member.name] = _add(blobs, *_packed(reader, packing))
            elif member.issym():
                links[member.name] = posixpath.normpath(f"{posixpath.dirname(member.name)}/{member.linkname}")
    (row,) = json.loads(documents["manifest.json"])
    config = _add(blobs, _CONFIG, [documents[row["Config"]]])
    rows = [layers[links.get(name, name)] for name in row["Layers"]]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": rows}
    return PackedImage(blobs, _add(blobs, MANIFEST, [json.dumps(manifest).encode()])["digest"])


def _packed(reader: io.BufferedReader, packing: Packing) -> tuple[str, Iterable[bytes]]:
    """(media type, bytes) of a layer in `packing`; one that is gzip stays as it is, as every engine takes it."""
    head = reader.peek()
    there = "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head[:4] == b"\x28\xb5\x2f\xfd" else "none"
    if there == "zstd" and packing == "none":
        return _LAYER, zstandard.ZstdDecompressor().read_to_iter(reader)
    if there == "none" and packing == "zstd":
        # Without the size in its head: the same layer gives the same bytes, however the engine hands it over. At the
        # usual level, about 300 MB/s per core: higher ones win little on images.
        return f"{_LAYER}+zstd", zstandard.ZstdCompressor(threads=-1).read_to_iter(reader)
    return _LAYER + ("" if there == "none" else f"+{there}"), iter(functools.partial(reader.read, CHUNK_BYTES), b"")


def _add(blobs: dict[str, Blob], media_type: str, pieces: Iterable[bytes]) -> dict[str, Any]:
    """What a manifest says of a blob, which is one of `blobs` now."""
    blob, digest = Blob(), hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        blob.append(piece)
    blob.size = blob.have
    name = f"sha256:{digest.hexdigest()}"
    blobs.setdefault(name, blob)
    return {"mediaType": media_type, "digest": name, "size": blob.size}
