"""The agent on this machine, over pipes: arrival, resumption, damage, refusal; with neither SSH nor a real engine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from testkit.local_connection import LocalConnection
from testkit.waiting import wait_for

from cluster.image.bundle import agent_command, agent_text
from cluster.image.node.blobs import BlobFolder, parse_blobs
from cluster.image.node.chain import make_runtime
from cluster.image.node.frames import FrameError, FrameReader, pack_data, pack_message
from cluster.image.node.keys import add_line, remove_lines
from cluster.image.node.links import Limiter, Sender
from cluster.image.session import AgentSession, StoredBlobs

ENGINE = """#!/bin/sh
case "$1 $2" in
"info --format") echo '{"ServerVersion": "1", "DockerRootDir": "/", "DriverStatus": []}' ;;
"image inspect") echo "Error: No such image: x" >&2; exit 1 ;;
"image ls") ;;
"load --quiet") cat > "$HOME/loaded.tar" ;;
esac
"""


class Node:
    """A node that is a folder of this machine, with an engine that takes anything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir(parents=True)
        (folder / ".ssh").mkdir()
        (folder / ".ssh/authorized_keys").write_text("ssh-ed25519 AAAA me@home\n")
        (tools / "docker").write_text(ENGINE)
        (tools / "docker").chmod(0o755)
        (tools / "python3").symlink_to(sys.executable)
        path = f"{tools}:{os.environ['PATH']}"
        self.connection = LocalConnection("node1", {"HOME": str(folder), "PATH": path, "XDG_CACHE_HOME": ""})
        self.events: queue.Queue[tuple[str, dict]] = queue.Queue()

    @property
    def blobs(self) -> Path:
        return self.folder / ".cache/burst/image-nodes/node1/blobs"

    def open(self) -> AgentSession:
        return AgentSession(self.connection, Limiter(None), lambda *event: self.events.put(event))

    def wait_for(self, *operations: str) -> dict:
        """The next message with one of these operations."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self.events.get(timeout=0.5)[1]
                if message["op"] in operations:
                    return message
        raise AssertionError(f"no {operations} came")


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path / "node")
    yield made
    for process in made.connection.processes:
        process.end()


class Layers:
    """Packed layers in files, as the launcher's store has them."""

    def __init__(self, folder: Path, *bodies: bytes) -> None:
        folder.mkdir()
        self.rows, self.paths = [], {}
        for number, body in enumerate(bodies):
            packed = zstandard.ZstdCompressor(level=3).compress(body)
            self.paths[number] = (folder / str(number), len(packed))
            (folder / str(number)).write_bytes(packed)
            names = {
                "sha256": hashlib.sha256(packed).hexdigest(),
                "diff_id": f"sha256:{hashlib.sha256(body).hexdigest()}",
            }
            self.rows.append({**names, "size": len(packed), "encoding": "zstd", "unpacked": len(body)})

    def setup(self, **changes) -> dict:
        archive = {
            "config": "e30=",
            "config_name": f"{'ab' * 32}.json",
            "tag": "app:1",
            "layers": [row["diff_id"] for row in self.rows],
        }
        numbers = list(range(len(self.rows)))
        message = {"op": "setup", "push": "push-1", "image": "app:1", "identity": "x", "blobs": self.rows, "same": None}
        return {**message, "need": numbers, "fetch": numbers, "archive": archive, "shared_wait_s": 1, **changes}


@pytest.fixture
def layers(tmp_path):
    return Layers(tmp_path / "store", os.urandom(3_000_000), b"text " * 100_000, b"")


def begin(node: Node, layers: Layers, source: StoredBlobs | None = None) -> AgentSession:
    session = node.open()
    session.offer(source or StoredBlobs(layers.paths))
    session.send({"op": "survey", "node": "node1", "engine": ["docker"], "identity": None})
    node.wait_for("survey")
    session.send(layers.setup())
    return session


def test_layers_arrive_verified_and_unpacked_in_one_archive(node, layers, tmp_path):
    session = begin(node, layers)
    session.send({"op": "feed"})
    failed = node.wait_for("failed")
    session.close()
    listing = subprocess.run(["tar", "tf", str(node.folder / "loaded.tar")], capture_output=True, text=True, check=True)

    assert failed["stage"] == "verify"  # this engine remembers nothing
    assert sorted(path.name for path in node.blobs.iterdir()) == sorted(row["sha256"] for row in layers.rows)
    names = [f"{row['diff_id'][7:]}.tar" for row in layers.rows]
    assert listing.stdout.split() == [*names, f"{'ab' * 32}.json", "manifest.json"]
    subprocess.run(["tar", "xf", str(node.folder / "loaded.tar"), "-C", str(tmp_path)], check=True)
    assert [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names] == [n[:-4] for n in names]


class Flipping(StoredBlobs):
    """Gives a damaged copy of a blob until it was asked for so often."""

    def __init__(self, paths, damaged: Path, times: int) -> None:
        super().__init__(paths)
        body = bytearray(paths[0][0].read_bytes())
        body[len(body) // 2] ^= 1
        damaged.write_bytes(body)
        self._damaged, self._times = damaged, times

    def follow(self, number, offset, generation, wait_s):
        found, path, ready = super().follow(number, offset, generation, wait_s)
        if number == 0 and self._times:
            self._times -= offset + (1 << 18) >= self.size(0)
            path = str(self._damaged)
        return found, path, ready


def test_a_layer_that_is_damaged_on_its_way_is_named_and_comes_again(node, layers, tmp_path):
    session = begin(node, layers, Flipping(layers.paths, tmp_path / "damaged", 1))
    session.send({"op": "feed"})
    corrupt, end = node.wait_for("corrupt"), node.wait_for("failed")
    session.close()

    assert corrupt["blob"] == 0
    assert end["stage"] == "verify"
    assert dict(end["received"])[0] == 2 * layers.rows[0]["size"]


def test_a_layer_that_is_damaged_again_and_again_fails_the_node(node, layers, tmp_path):
    session = begin(node, layers, Flipping(layers.paths, tmp_path / "damaged", 99))
    session.send({"op": "feed"})
    failed = node.wait_for("failed")
    session.close()

    assert failed["stage"] == "receive"
    assert "arrived damaged 3 times" in failed["error"]


def test_bytes_that_are_there_are_asked_for_no_more(node, layers):
    node.blobs.mkdir(parents=True)
    packed = layers.paths[0][0].read_bytes()
    (node.blobs / f"{layers.rows[0]['sha256']}.part").write_bytes(packed[:1_000_000])
    session = begin(node, layers)
    session.send({"op": "feed"})
    end = node.wait_for("failed")
    session.close()

    assert end["stage"] == "verify"
    assert dict(end["received"])[0] == len(packed) - 1_000_000


def test_a_second_push_to_the_same_node_waits_and_then_says_so(node, layers, tmp_path):
    first = begin(node, layers)
    node.wait_for("ready")
    second = begin(node, layers)
    message = node.wait_for("failed")
    first.close()
    second.close()

    assert "another push is working on this node" in message["error"]


@pytest.mark.parametrize(
    "message",
    [
        {"op": "survey", "node": "../../etc", "engine": ["docker"]},
        {"op": "survey", "node": "..", "engine": ["docker"]},
        {"op": "survey", "node": 5, "engine": ["docker"]},
        {"op": "no-such-thing"},
        {"op": "feed"},
        {"op": "setup"},
    ],
)
def test_messages_that_make_no_sense_end_the_agent_and_nothing_else(node, message):
    session = node.open()
    session.send(message)
    failed, gone = node.wait_for("failed"), node.wait_for("gone")
    session.close()

    assert failed["stage"] == "protocol"
    assert gone["error"]
    assert not (node.folder / ".cache").exists()


def test_an_agent_ends_when_its_launcher_is_gone(node):
    session = node.open()
    session.send({"op": "ping"})
    wait_for(lambda: not node.events.empty(), "a first word")
    session.close()
    process = node.connection.processes[0].popen

    assert process.wait(200) == 0


def test_the_agent_leaves_no_key_behind_when_its_launcher_is_gone(node, layers):
    session = begin(node, layers)
    session.send({"op": "listen", "public_key": "ecdsa-sha2-nistp256 AAAA"})
    listening = node.wait_for("listening")
    keys = node.folder / ".ssh/authorized_keys"
    during = keys.read_text()
    session.close()
    node.connection.processes[0].popen.wait(200)

    assert listening["error"] is None
    assert 'restrict,command="python3 -I -c' in during
    assert keys.read_text() == "ssh-ed25519 AAAA me@home\n"


def test_the_agent_runs_as_python_3_6_code(node):
    """The oldest Python that burst wants is not on every machine; where it is, the agent runs on it."""
    old = next((path for path in Path("/usr/bin").glob("python3.[6-9]") if os.access(path, os.X_OK)), sys.executable)
    question = pack_message({"op": "survey", "node": "node1", "engine": ["docker"]})
    environment = {**os.environ, "HOME": str(node.folder), "PATH": f"{node.folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(old), *agent_command()[1:]],
        input=agent_text() + question,
        env=environment,
        capture_output=True,
        timeout=200,
    )
    stream = iter([done.stdout, b""])
    answer = FrameReader(_reader(next(stream))).next()

    assert answer is not None
    assert answer.message is not None
    assert answer.message["op"] == "survey"


def _reader(data: bytes):
    left = bytearray(data)

    def read(size: int) -> bytes:
        part = bytes(left[:size])
        del left[:size]
        return part

    return read


def folder_of(path: Path, layers: Layers) -> BlobFolder:
    return BlobFolder(str(path), parse_blobs(layers.rows))


@pytest.mark.parametrize("offset", [1, 10])
def test_bytes_that_do_not_continue_a_blob_are_refused(tmp_path, layers, offset):
    with pytest.raises(FrameError, match="bytes at"):
        folder_of(tmp_path / "blobs", layers).append(0, offset, b"x")


def test_more_bytes_than_a_blob_has_are_refused(tmp_path, layers):
    with pytest.raises(FrameError, match="bytes at"):
        folder_of(tmp_path / "blobs", layers).append(0, 0, b"x" * (layers.rows[0]["size"] + 1))


def test_a_write_that_failed_half_way_is_cut_off_before_the_next(tmp_path, layers):
    folder = folder_of(tmp_path / "blobs", layers)
    packed = layers.paths[0][0].read_bytes()
    folder.append(0, 0, packed[:1000])
    part = Path(folder.path(0) + ".part")
    part.write_bytes(part.read_bytes() + b"left over")

    assert folder.append(0, 1000, packed[1000:])
    assert Path(folder.path(0)).read_bytes() == packed


def test_a_follower_begins_again_when_what_it_followed_is_dropped(tmp_path, layers):
    """A blob that grows, is thrown away and comes again, followed by a sender: its receiver gets it right at last."""
    folder, packed = folder_of(tmp_path / "blobs", layers), layers.paths[0][0].read_bytes()
    sent = bytearray()
    sender = Sender(sent.extend, folder, Limiter(None), lambda problem: None)
    folder.append(0, 0, b"wrong" + packed[5:700_000])
    sender.request([(0, 0)])
    sender.start()
    wait_for(lambda: len(sent) >= 700_000, "the first bytes")
    folder.drop(0)
    folder.append(0, 0, packed)
    wait_for(lambda: sender.sent_bytes >= 700_000 + len(packed), "all bytes again")
    sender.close()
    reader, body, restarts = FrameReader(_reader(bytes(sent))), bytearray(), 0
    while (frame := reader.next()) is not None:
        if frame.message is not None:
            assert frame.message == {"op": "restart", "blob": 0}
            body, restarts = bytearray(), restarts + 1
        else:
            assert frame.offset == len(body)
            body += frame.data

    assert restarts == 1
    assert body == packed


def test_messages_overtake_data():
    sent: list[bytes] = []
    sender = Sender(
        sent.append, StoredBlobs({0: (Path(__file__), Path(__file__).stat().st_size)}), Limiter(None), print
    )
    sender.request([(0, 0)])
    sender.message({"op": "first"})
    sender.start()
    wait_for(lambda: len(sent) == 2, "message and data")
    sender.close()

    assert sent[0] == pack_message({"op": "first"})
    assert sent[1] == pack_data(0, 0, Path(__file__).read_bytes())


def test_other_lines_of_authorized_keys_stay_byte_by_byte(tmp_path):
    path = tmp_path / "authorized_keys"
    before = b'# mine\r\nssh-rsa AAAA \xff me\n\n  from="10.*" ssh-ed25519 BBBB x burst-image-push-not'
    path.write_bytes(before)
    path.chmod(0o640)
    for push, host in (("push-1", "node1"), ("push-2", "node1"), ("push-3", "node2")):
        add_line(str(path), f"restrict ssh-ed25519 CCCC burst-image-push {push} {host}")

    assert remove_lines(str(path), "node1", "push-1") == 1
    assert remove_lines(str(path), "node1") == 1
    assert path.read_bytes() == before + b"\nrestrict ssh-ed25519 CCCC burst-image-push push-3 node2\n"
    assert path.stat().st_mode & 0o777 == 0o640


def test_folders_of_dead_agents_are_swept_and_those_of_live_ones_are_not():
    ended = subprocess.Popen(["true"])
    ended.wait()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    with subprocess.Popen(["sleep", "60"]) as living:
        dead, live = (base / f"burst-image-{pid}-{os.geteuid()}" for pid in (ended.pid, living.pid))
        for folder in (dead, live):
            laid = base / f"being-laid-{folder.name}"  # another agent may sweep what bears its true name
            laid.mkdir()
            (laid / "key").write_text("secret")
            laid.rename(folder)
        own = Path(make_runtime())
        seen = [dead.exists(), live.exists(), own.stat().st_mode & 0o777]
        for folder in (live, own):
            shutil.rmtree(folder)
        living.kill()

    assert seen == [False, True, 0o700]


def test_no_secret_is_in_the_command_line_of_the_agent():
    assert "key" not in json.dumps(agent_command()).lower()
