"""What the engine saves becomes blobs, and a registry gives them to whoever knows the token, also while they arrive."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zstandard
from testkit.image_rig import noise, saved_image, tar_of
from testkit.local_connection import LocalConnection

from cluster.errors import ClusterError
from cluster.image.archive import PackedImage, pack_archive
from cluster.image.node.registry import Blob, Limiter
from cluster.image.node.relay import Relay
from cluster.image.relays import Feed, PushSecrets

LAYERS = (tar_of({"a": b"alpha" * 500_000}), tar_of({"b": noise(2 << 20, 1)}), tar_of({}))
BODY = noise(700_000, 3)


def sha(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def body_of(blob: Blob) -> bytes:
    return b"".join(blob.pieces(0, blob.have))


def unpacked(image: PackedImage) -> list[tuple[str, bytes]]:
    """How its layers are packed, and these, from the bottom up; digests and sizes are looked at on the way."""
    manifest = json.loads(body_of(image.blobs[image.manifest]))
    bodies = [body_of(image.blobs[row["digest"]]) for row in manifest["layers"]]
    for row, body in zip(manifest["layers"], bodies, strict=True):
        assert (row["digest"], row["size"]) == (sha(body), len(body))
    kinds = [row["mediaType"].partition("+")[2] for row in manifest["layers"]]
    unpack = {
        "": bytes,
        "gzip": gzip.decompress,
        "zstd": lambda body: zstandard.ZstdDecompressor().decompressobj().decompress(body),
    }
    return [(kind, unpack[kind](body)) for kind, body in zip(kinds, bodies, strict=True)]


def oci(*blobs: bytes) -> bytes:
    """As the store of containerd saves: blobs, layers perhaps packed, and the manifest of Docker beside its own."""
    config = json.dumps({"rootfs": {"diff_ids": []}}).encode()
    name = {body: f"blobs/sha256/{sha(body)[7:]}" for body in (*blobs, config)}
    row = {"Config": name[config], "RepoTags": ["a:1"], "Layers": [name[body] for body in blobs]}
    files = {name[body]: body for body in name} | {"index.json": b"{}", "oci-layout": b"{}"}
    return tar_of({**files, "manifest.json": json.dumps([row]).encode()})


@pytest.mark.parametrize("packing", ["zstd", "none"])
@pytest.mark.parametrize(
    ("archive", "kinds"),
    [
        (saved_image(*LAYERS)[0], {"zstd": "zstd", "none": ""}),
        (oci(*LAYERS), {"zstd": "zstd", "none": ""}),
        (oci(*(gzip.compress(layer) for layer in LAYERS)), {"zstd": "gzip", "none": "gzip"}),
        (oci(*(zstandard.compress(layer) for layer in LAYERS)), {"zstd": "zstd", "none": ""}),
    ],
    ids=["classic", "oci", "oci-gzip", "oci-zstd"],
)
def test_every_layout_becomes_the_same_layers(archive, kinds, packing):
    image, again = (pack_archive(io.BytesIO(archive), packing) for _ in range(2))

    assert unpacked(image) == [(kinds[packing], layer) for layer in LAYERS]
    assert again.manifest == image.manifest


def test_a_layer_that_is_a_link_is_the_layer_it_leads_to():
    archive, config = saved_image(LAYERS[0], LAYERS[1], LAYERS[0], links={2: 0})
    image = pack_archive(io.BytesIO(archive), "none")

    assert unpacked(image) == [("", LAYERS[0]), ("", LAYERS[1]), ("", LAYERS[0])]
    assert body_of(image.blobs[sha(config)]) == config


@pytest.mark.parametrize(
    ("archive", "text"),
    [
        (saved_image(*LAYERS)[0][:200_000], "damaged|does not describe"),
        (tar_of({"a": b"x"}), "does not describe"),
        (tar_of({"manifest.json": b"[{}, {}]"}), "does not describe"),
        (saved_image(*LAYERS, links={1: 1})[0], r"left a layer out of its archive: '0{63}1/layer.tar'"),
    ],
)
def test_an_archive_that_makes_no_sense_is_an_error_in_words(archive, text):
    with pytest.raises(ClusterError, match=text):
        pack_archive(io.BytesIO(archive), "none")


def blob_of(body: bytes) -> Blob:
    blob = Blob("application/x", len(body))
    blob.append(body)
    return blob


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def path_of(body: bytes, token: str, kind: str = "blobs") -> str:
    return f"/v2/{token}/burst/{kind}/{sha(body)}"


class LocalNode(LocalConnection):
    """A node whose forwarded port is one of this machine."""

    def __init__(self, name: str) -> None:
        super().__init__(name, {"SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 2"})

    def forward(self, serve) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            with listener:
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def launcher_port(made: PushSecrets, limit: float | None = None) -> Iterator[int]:
    """The port of a node whose engine pulls from the launcher, which has `BODY`."""
    with LocalNode("node") as node:
        yield Feed(node, PackedImage({sha(BODY): blob_of(BODY)}, sha(BODY)), made, Limiter(limit)).ports[0]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/", 200),
        ("GET", path_of(BODY, "{token}"), 200),
        ("GET", path_of(BODY, "{token}", "manifests"), 200),
        ("HEAD", path_of(BODY, "{token}"), 200),
        ("GET", path_of(BODY, "0" * 32), 404),
        ("GET", path_of(b"other", "{token}"), 404),
        ("GET", path_of(BODY, "{token}") + "/../../../etc/passwd", 404),
        ("PUT", path_of(BODY, "{token}"), 501),
        ("POST", "/v2/burst/blobs/uploads/", 501),
    ],
)
def test_only_who_knows_the_token_reads_and_nobody_writes(method, path, status):
    made = PushSecrets()
    with launcher_port(made) as port:
        code, body, headers = ask(port, path.format(token=made.token), method)

    assert code == status
    assert (body == BODY) == (method == "GET" and status == 200 and path != "/v2/")
    assert headers.get("Docker-Content-Digest", sha(BODY)) == sha(BODY)


@pytest.mark.parametrize("begin", [0, 1, len(BODY) - 1])
def test_a_range_is_the_rest_of_a_blob(begin):
    made = PushSecrets()
    with launcher_port(made) as port:
        code, body, headers = ask(port, path_of(BODY, made.token), Range=f"bytes={begin}-")

    assert (code, body) == (206, BODY[begin:])
    assert headers["Content-Range"] == f"bytes {begin}-{len(BODY) - 1}/{len(BODY)}"


@pytest.fixture
def feed():
    """Starts relays, each with a way to the launcher, which serves `blob`; ends them."""
    nodes: list[LocalNode] = []
    feeds: list[Feed] = []

    def start(blob: Blob, made: PushSecrets, *before: Feed) -> Feed:
        nodes.append(LocalNode(f"node{len(nodes)}"))
        feeds.append(Feed(nodes[-1], PackedImage({sha(BODY): blob}, sha(BODY)), made, Limiter(None)))
        assert feeds[-1].start_relay(None, feeds_others=True) == ""
        feeds[-1].link(before)
        return feeds[-1]

    yield start
    for one, node in zip(feeds, nodes, strict=True):
        one.end_relay()
        assert node.processes[0].popen.wait(20) in (0, -9)
        node.close()


@pytest.mark.parametrize("dies", [False, True])
def test_relays_pass_on_bytes_while_they_arrive_fetch_each_once_and_leave_out_the_dead(feed, dies):
    blob, half, made = Blob("application/x", len(BODY)), len(BODY) // 2, PushSecrets()
    blob.append(BODY[:half])
    first = feed(blob, made)
    second = feed(blob, made, first)
    third = feed(blob, made, second, first)
    connection = http.client.HTTPConnection("127.0.0.1", third.ports[0], timeout=20)
    connection.request("GET", path_of(BODY, made.token))
    answer = connection.getresponse()
    begin = answer.read(half)
    if dies:
        second.connection.processes[0].popen.kill()
    blob.append(BODY[half:])
    whole = begin + answer.read()
    connection.close()
    others = [ask(one.ports[0], path_of(BODY, made.token))[1] for one in (first, *([] if dies else [second]), third)]
    for one in (first, second, third):
        one.end_relay()

    assert whole == BODY
    assert set(others) == {BODY}
    assert [one.sent_bytes for one in (first, second, third)] == [len(BODY), 0, 0]
    assert [one.received_bytes for one in (first, third)] == [len(BODY)] * 2  # known whole when a relay ends


def test_what_is_asked_for_at_once_is_fetched_in_the_same_order_on_every_node():
    fetched, is_over = [], threading.Event()

    class Before:
        """A node before this one; it has everything."""

        def read(self, digest, blob):
            fetched.append(digest)
            blob.append(bytes(blob.size))
            if len(fetched) == 3:
                is_over.set()

    one = Relay({digest: Blob("application/x", 10) for digest in ("a", "b", "c", "d")})
    one.start([Before()])
    for digest in ("d", "c", "a"):
        one.want(digest)
    assert is_over.wait(20)
    assert fetched == ["a", "c", "d"]


def test_a_relay_whose_upstreams_all_break_off_does_so_too(feed):
    blob = Blob("application/x", len(BODY))
    blob.set_failed(True)
    made = PushSecrets()
    alone = feed(blob, made)
    with pytest.raises(http.client.IncompleteRead):
        ask(alone.ports[0], path_of(BODY, made.token))


def test_a_peer_needs_the_certificate_and_the_token_of_the_push(feed):
    made, failed = PushSecrets(), Blob("application/x", len(BODY))
    failed.set_failed(True)
    first = feed(blob_of(BODY), made)
    where = first._peer
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        ask(where["port"], path_of(BODY, made.peer_token))
    first._peer = {**where, "certificate": PushSecrets().certificate}
    strange = feed(failed, made, first)
    with pytest.raises(http.client.IncompleteRead):
        ask(strange.ports[0], path_of(BODY, made.token))


def test_the_limit_holds_over_all_who_read():
    made = PushSecrets()
    with launcher_port(made, 2e6) as port:
        threads = [threading.Thread(target=ask, args=(port, path_of(BODY, made.token))) for _ in range(2)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert time.monotonic() - begin >= 0.5  # 0.7 s without what goes at once
