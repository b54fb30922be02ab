"""What the engine saves becomes blobs, and a registry gives them to whoever knows the token, also while they arrive."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.client
import io
import json
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import ThreadingTCPServer

import psutil
import pytest
import zstandard
from testkit.connections import FakeProcess, LocalConnection
from testkit.image_rig import noise, saved_image, tar_of
from testkit.waiting import wait_for

from cluster.agent.messages import READY, MessageReader, pack
from cluster.errors import ClusterError
from cluster.image.archive import PackedImage, pack_archive, pack_image
from cluster.image.engine import Image
from cluster.image.feed import Feed, Limiter, new_certificate
from cluster.image.node.registry import Blob
from cluster.image.node.relay import Relay

CONFIG, MANIFEST = (f"application/vnd.oci.image.{kind}.v1+json" for kind in ("config", "manifest"))
LAYERS = (tar_of({"[a": b"alpha" * 500_000}), tar_of({"b": noise(2 << 20, 1)}), tar_of({}))
BODY = noise(700_000, 3)
TOKEN = "c0" * 16


def sha(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def body_of(blob: Blob) -> bytes:
    return b"".join(blob.pieces(0))


def unpacked(image: PackedImage) -> list[tuple[str, bytes]]:
    """How its layers are packed, and these, from the bottom up; digests and sizes are looked at on the way."""
    manifest = json.loads(body_of(image.blobs[image.manifest]))
    assert image.size_bytes == sum(len(body_of(blob)) for blob in image.blobs.values())
    digest, layers = manifest["config"]["digest"], manifest["layers"]
    config = {"mediaType": CONFIG, "digest": digest, "size": len(body_of(image.blobs[digest]))}
    assert manifest == {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
    bodies = [body_of(image.blobs[row["digest"]]) for row in layers]
    for row, body in zip(layers, bodies, strict=True):
        assert (row["digest"], row["size"]) == (sha(body), len(body))
    types = [row["mediaType"].partition("+") for row in layers]
    assert {kind for kind, _, _ in types} == {"application/vnd.oci.image.layer.v1.tar"}
    unpack = {
        "": bytes,
        "gzip": gzip.decompress,
        "zstd": lambda body: zstandard.ZstdDecompressor().decompressobj().decompress(body),
    }
    return [(kind, unpack[kind](body)) for (_, _, kind), body in zip(types, bodies, strict=True)]


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
        (saved_image(*LAYERS)[0][:200_000], "cannot be packed: "),
        (tar_of({"a": b"x"}), "manifest.json"),
        (tar_of({"manifest.json": b"[{}, {}]"}), "cannot be packed: "),
        (saved_image(*LAYERS, links={1: 1})[0], "0{63}1/layer.tar"),
        (b"", "no such daemon"),
        (b"yes", "cannot be packed: "),  # which never ends
    ],
)
def test_an_archive_that_makes_no_sense_is_an_error_in_words(archive, text, tmp_path):
    (tmp_path / "saved").write_bytes(archive)
    script = "cd {}; ! grep -qx yes saved || exec yes; [ -s saved ] || echo no such daemon >&2; cat saved"
    engine = ("sh", "-c", script.format(tmp_path))
    with pytest.raises(ClusterError, match=f"cannot export a:1: .*{text}"):
        pack_image(engine, Image("a:1", "", "", "", 1, 1), "none")


def test_a_blob_lies_where_it_may_be_large_and_goes_with_the_last_who_has_it(tmp_path, monkeypatch):
    for given, place in ((str(tmp_path), tmp_path), ("", Path("/var/tmp"))):
        monkeypatch.setenv("TMPDIR", given)
        blob = Blob(1)
        link = Path(f"/proc/self/fd/{blob.descriptor}")
        file = link.readlink()
        assert file.parent == place
        del blob
        assert not link.is_symlink() or link.readlink() != file


def blob_of(body: bytes) -> Blob:
    blob = Blob(len(body))
    blob.append(body)
    return blob


def ask(
    port: int, path: str, method: str = "GET", *, connect=http.client.HTTPConnection, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = connect("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def path_of(body: bytes, kind: str = "blobs", token: str = TOKEN) -> str:
    return f"/v2/{token}/burst/{kind}/{sha(body)}"


def serve_relay(there: socket.socket) -> None:
    """What a relay does on a node, in a thread of this process."""
    stream, relay = there.makefile("rb"), Relay()
    stream.read(int(stream.read(10)))  # its code
    there.sendall(READY)
    reader = MessageReader(stream.read, 0)
    while (asked := reader.next()) is not None:
        there.sendall(pack(*relay.answer(*asked)))


class LocalNode(LocalConnection):
    """A node whose forwarded port is one of this machine; its relay is a process only where it has to be."""

    def __init__(self, name: str, *, is_process: bool) -> None:
        super().__init__(name)
        self._is_process = is_process

    def start(self, argv):
        return super().start(argv) if self._is_process else FakeProcess(self.host.name, serve_relay)

    def forward(self, serve) -> int:
        server = ThreadingTCPServer(("127.0.0.1", 0), lambda guest, *_: serve(guest))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address[1]


@pytest.fixture
def feed(monkeypatch):
    """Feeds of nodes of this machine, whose launcher has `blob`; with a certificate there is a relay."""
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 2")
    nodes: list[LocalNode] = []
    feeds: list[Feed] = []

    def start(blob: Blob, *before: Feed, certificate="", rate=None, is_process=False) -> Feed:
        nodes.append(LocalNode(f"node{len(nodes)}", is_process=is_process))
        feeds.append(Feed(nodes[-1], {sha(BODY): blob}, TOKEN, Limiter(rate)))
        if certificate:
            feeds[-1].start_relay(certificate)
            feeds[-1].follow_relay(before)
        assert feeds[-1].notes == []
        return feeds[-1]

    yield start
    for one, node in zip(feeds, nodes, strict=True):
        one.end()
        assert {process.popen.wait(20) for process in node.processes} <= {0, -9}
        node.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/", 200),
        ("GET", path_of(BODY), 200),
        ("GET", path_of(BODY, "manifests"), 200),
        ("HEAD", path_of(BODY), 200),
        ("GET", path_of(BODY, token="0" * 32), 404),
        ("GET", path_of(b"other"), 404),
        ("GET", path_of(BODY) + "/../../../etc/passwd", 404),
        ("PUT", path_of(BODY), 501),
        ("POST", "/v2/burst/blobs/uploads/", 501),
    ],
)
def test_only_who_knows_the_token_reads_and_nobody_writes(method, path, status, feed):
    one = feed(blob_of(BODY))
    code, body, headers = ask(one.ports[0], path, method)
    is_there = status == 200 and path != "/v2/"
    kind = MANIFEST if "manifests" in path else "application/octet-stream"
    assert (code, body == BODY) == (status, is_there and method == "GET")
    assert (one.sent_bytes, one.received_bytes) == ((len(BODY),) * 2 if body == BODY else (0, 0))
    if is_there:
        assert (headers["Docker-Content-Digest"], headers["Content-Type"]) == (sha(BODY), kind)


def test_who_begins_with_tls_is_told_in_http_that_there_is_none(feed):
    hello, context = ssl.MemoryBIO(), ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    with socket.create_connection(("127.0.0.1", feed(blob_of(BODY)).ports[0]), 20) as connection:
        connection.sendall(hello.read())
        assert connection.recv(13) == b"HTTP/1.1 400 "


@pytest.mark.parametrize("begin", [0, 1, len(BODY) - 1])
def test_a_range_is_the_rest_of_a_blob(begin, feed):
    code, body, headers = ask(feed(blob_of(BODY)).ports[0], path_of(BODY), Range=f"bytes={begin}-")
    assert (code, body) == (206, BODY[begin:])
    assert headers["Content-Range"] == f"bytes {begin}-{len(BODY) - 1}/{len(BODY)}"


def test_the_limit_holds_over_all_who_read(feed):
    port = feed(blob_of(BODY), rate=2e6).ports[0]
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, [port] * 2, [path_of(BODY)] * 2))
    assert time.monotonic() - begin >= 0.5  # 0.7 s without what goes at once


@pytest.mark.parametrize("dies", [False, True])
def test_relays_pass_on_bytes_while_they_arrive_fetch_each_once_and_leave_out_the_dead(feed, dies):
    blob, half, certificate = Blob(len(BODY)), len(BODY) // 2, new_certificate()
    blob.append(BODY[:half])
    first = feed(blob, certificate=certificate, is_process=dies)
    second = feed(blob, first, certificate=certificate, is_process=dies)
    third = feed(blob, second, first, certificate=certificate, is_process=dies)
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", third.ports[0], timeout=20)
            stack.callback(connection.close)
            connection.request("GET", path_of(BODY))
            answers.append(connection.getresponse())
        begins = [answer.read(half) for answer in answers]
        if dies:
            assert processor_s(third) < 0.15
            second.connection.processes[0].popen.kill()
        blob.append(BODY[half:])
        whole = {begin + answer.read() for begin, answer in zip(begins, answers, strict=True)}
    others = [ask(one.ports[0], path_of(BODY))[1] for one in (first, *([] if dies else [second]), third)]
    for one in (first, second, third):
        one.end()
    assert whole == set(others) == {BODY}
    assert [one.sent_bytes for one in (first, second, third)] == [len(BODY), 0, 0]
    assert [one.received_bytes for one in (first, third)] == [len(BODY)] * 2  # known whole when a relay ends
    assert (first.notes, third.notes) == ([], [])


def processor_s(one: Feed) -> float:
    """What its relay, which waits, takes while a busy process gets half a second."""
    relay = psutil.Process(one.connection.processes[0].popen.pid)
    before, begin = sum(relay.cpu_times()[:2]), time.process_time()
    while time.process_time() - begin < 0.5:
        pass
    return sum(relay.cpu_times()[:2]) - before


def test_a_relay_without_files_pauses_says_so_and_lets_in_who_waited(feed):
    one = feed(blob_of(BODY), certificate=new_certificate(), is_process=True)
    relay = psutil.Process(one.connection.processes[0].popen.pid)
    soft, hard = relay.rlimit(psutil.RLIMIT_NOFILE)
    for limit in (soft, 4):  # who waits for a guest has a file for one
        relay.rlimit(psutil.RLIMIT_NOFILE, (limit, hard))
        assert ask(one.ports[0], path_of(BODY))[1] == BODY
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, one.ports[0], path_of(BODY))
        wait_for(lambda: any("Too many open files" in note for note in one.notes), lambda: str(one.notes), 20)
        assert processor_s(one) < 0.15
        relay.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert waiting.result()[1] == BODY
    assert len(one.notes) == len(set(one.notes))


def given_up() -> Blob:
    blob = Blob(len(BODY))
    blob.is_given_up = True
    return blob


def test_a_relay_whose_upstreams_all_break_off_does_so_too_and_asks_the_last_alone_the_next_time(feed):
    blob, certificate = given_up(), new_certificate()
    one = feed(blob, feed(blob, certificate=certificate), certificate=certificate)
    with pytest.raises(http.client.IncompleteRead):
        ask(one.ports[0], path_of(BODY))
    blob.append(BODY)
    assert ask(one.ports[0], path_of(BODY))[1] == BODY
    assert one.sent_bytes == len(BODY)


def test_a_peer_needs_the_certificate_of_the_push(feed):
    certificate = new_certificate()
    first = feed(blob_of(BODY), certificate=certificate)
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        ask(first._relay[2], path_of(BODY))
    anybody = functools.partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(first._relay[2], path_of(BODY), connect=anybody)
    strange = feed(given_up(), first, certificate=new_certificate())
    with pytest.raises(http.client.IncompleteRead):
        ask(strange.ports[0], path_of(BODY))
    assert first.sent_bytes == 0
    friend = feed(given_up(), first, certificate=certificate)
    with socket.create_connection(("127.0.0.1", first._relay[2])):  # who says nothing keeps nobody out
        assert ask(friend.ports[0], path_of(BODY))[1] == BODY
