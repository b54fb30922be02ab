"""Reading what engines save, and keeping it packed: both layouts, interruption, damage."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.image_rig import tar_of

from cluster.errors import ClusterError
from cluster.image.archive import ArchiveError, read_archive
from cluster.image.store import Store

IDENTITY = "1d" * 32
LAYERS = (tar_of({"a": b"alpha" * 5000}), tar_of({"b": b"beta"}), tar_of({}))


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def settings_of(layers) -> bytes:
    return json.dumps({"rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in layers]}}).encode()


def classic(layers, **extra: bytes) -> bytes:
    """As the classic store saves: the settings lie behind the layers."""
    config = settings_of(layers)
    names = [f"{k:064x}/layer.tar" for k in range(len(layers))]
    manifest = json.dumps([{"Config": f"{sha(config)}.json", "RepoTags": ["a:1"], "Layers": names}]).encode()
    versions = {f"{k:064x}/VERSION": b"1.0" for k in range(len(layers))}
    files = {**dict(zip(names, layers, strict=True)), **versions, f"{sha(config)}.json": config}
    return tar_of({**files, "manifest.json": manifest, "repositories": b"{}", **extra})


def oci(layers, pack, *, with_manifest: bool) -> bytes:
    """As the store of containerd saves: blobs, layers perhaps packed."""
    config = settings_of(layers)
    packed = [pack(layer) for layer in layers]
    manifest = json.dumps(
        {
            "config": {"digest": f"sha256:{sha(config)}"},
            "layers": [{"digest": f"sha256:{sha(blob)}"} for blob in packed],
        }
    ).encode()
    index = json.dumps({"manifests": [{"digest": f"sha256:{sha(manifest)}"}]}).encode()
    blobs = {f"blobs/sha256/{sha(blob)}": blob for blob in (*packed, config, manifest)}
    legacy = json.dumps([{"Config": f"blobs/sha256/{sha(config)}", "RepoTags": ["a:1"], "Layers": []}]).encode()
    files = {**blobs, "index.json": index, "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    return tar_of({**files, **({"manifest.json": legacy} if with_manifest else {})})


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


SAVED = {
    "classic": classic(LAYERS),
    "oci": oci(LAYERS, bytes, with_manifest=True),
    "oci without manifest.json": oci(LAYERS, bytes, with_manifest=False),
    "oci with gzip": oci(LAYERS, gzip.compress, with_manifest=True),
    "oci with zstd": oci(LAYERS, zstd, with_manifest=False),
}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "images")


def unpacked(store: Store, layer, encoding: str) -> bytes:
    body = store.path(layer, encoding).read_bytes()
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return gzip.decompress(body) if encoding == "gzip" else body


@pytest.mark.parametrize("layout", SAVED)
def test_every_layout_gives_the_same_layers(store, layout):
    image = store.add(io.BytesIO(SAVED[layout]), IDENTITY, "a:1")

    assert image.saved.config == settings_of(LAYERS)
    assert [unpacked(store, layer, "zstd") for layer in image.layers] == list(LAYERS)
    assert [layer.diff_id for layer in image.layers] == [f"sha256:{sha(layer)}" for layer in LAYERS]
    assert store.find(IDENTITY, "a:1") == image


@pytest.mark.parametrize("encoding", ["gzip", "none"])
def test_layers_are_packed_anew_for_nodes_without_zstd(store, encoding):
    image = store.pack(store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1"), encoding)

    for layer, body in zip(image.layers, LAYERS, strict=True):
        assert unpacked(store, layer, encoding) == body
        assert layer.packings[encoding].sha256 == sha(store.path(layer, encoding).read_bytes())


def test_layers_that_are_there_are_stored_once(store):
    store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1")
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("zstd")}
    other = (LAYERS[0], tar_of({"c": b"new"}))
    store.add(io.BytesIO(classic(other)), "2e" * 32, "b:1")

    after = {path: path.stat().st_mtime_ns for path in store.root.rglob("zstd")}
    assert before.items() < after.items()
    assert len(after) == 4


class Broken(io.BytesIO):
    """A stream whose writer dies on the way."""

    def __init__(self, body: bytes, at: int) -> None:
        super().__init__(body)
        self._at = at

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > self._at:
            raise OSError("interrupted")
        return super().read(size)


def test_an_interrupted_export_leaves_no_image_and_no_half_layer(store):
    saved = classic((*LAYERS[:1], tar_of({"big": bytes(3_000_000)})))
    with pytest.raises(OSError, match="interrupted"):
        store.add(Broken(saved, 200_000), IDENTITY, "a:1")

    assert store.find(IDENTITY, "a:1") is None
    assert not list(store.root.rglob(".new-*"))
    assert [sha(unpacked(store, layer, "zstd")) for layer in [store._layer(f"sha256:{sha(LAYERS[0])}")] if layer]


def test_a_truncated_archive_is_an_error_in_words(store):
    with pytest.raises((ArchiveError, ClusterError)):
        store.add(io.BytesIO(SAVED["classic"][:30_000]), IDENTITY, "a:1")


def test_a_layer_that_the_engine_left_out_is_named(store):
    config = settings_of(LAYERS)
    manifest = json.dumps([{"Config": "c.json", "Layers": []}]).encode()
    saved = tar_of({"x/layer.tar": LAYERS[0], "c.json": config, "manifest.json": manifest})
    with pytest.raises(ArchiveError, match="left 2 of 3 layers out"):
        store.add(io.BytesIO(saved), IDENTITY, "a:1")


@pytest.mark.parametrize("files", [{}, {"manifest.json": b"[]"}, {"index.json": b"{}"}, {"manifest.json": b"[1"}])
def test_what_is_no_image_is_refused(files):
    with pytest.raises(ArchiveError):
        read_archive(io.BytesIO(tar_of(files)), lambda pieces, size: "")


def test_a_layer_linked_to_another_one_is_no_file_of_its_own(store):
    """The classic store saves the second of two equal layers as a link to the first."""
    stream = io.BytesIO(classic((LAYERS[0],)))
    with tarfile.open(fileobj=stream, mode="a") as archive:
        link = tarfile.TarInfo("ff/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, f"../{0:064x}/layer.tar"
        archive.addfile(link)
    stream.seek(0)

    assert len(store.add(stream, IDENTITY, "a:1").layers) == 1


def test_a_damaged_packed_layer_is_noticed_and_made_anew(store):
    image = store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1")
    path = store.path(image.layers[0], "zstd")
    body = bytearray(path.read_bytes())
    body[20] ^= 1
    path.write_bytes(body)

    assert store.verify(image.layers[1], "zstd")
    assert not store.verify(image.layers[0], "zstd")
    assert store.find(IDENTITY, "a:1") is None


def test_a_truncated_packed_layer_does_not_count(store):
    image = store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1")
    path = store.path(image.layers[0], "zstd")
    path.write_bytes(path.read_bytes()[:-1])

    assert store.find(IDENTITY, "a:1") is None


def test_the_store_is_private_and_prune_removes_all_of_it_and_nothing_else(store):
    store.add(io.BytesIO(SAVED["classic"]), IDENTITY, "a:1")
    mine = store.root / "layers" / "notes.txt"
    mine.write_text("keep")
    would = store.prune(dry_run=True)
    did = store.prune(dry_run=False)

    assert store.root.stat().st_mode & 0o777 == 0o700
    assert would == did == (7, did[1])
    assert did[1] > 0
    assert [path for path in store.root.rglob("*") if path.is_file()] == [mine, store.root / "lock"] or mine.exists()
    assert store.find(IDENTITY, "a:1") is None


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.binary(max_size=3000), min_size=1, max_size=4, unique=True),
    st.sampled_from([bytes, gzip.compress, zstd]),
)
def test_layers_survive_any_packing(bodies, pack):
    layers = [tar_of({"file": body}) for body in bodies]
    found = {}

    def add(pieces, size):
        body = b"".join(pieces)
        assert size in (None, len(body))
        found[f"sha256:{sha(body)}"] = body
        return f"sha256:{sha(body)}"

    saved = read_archive(io.BytesIO(oci(layers, pack, with_manifest=False)), add)
    assert [found[diff_id] for diff_id in saved.diff_ids] == layers
