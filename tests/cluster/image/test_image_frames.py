"""Frames between launcher and nodes: what goes in comes out, and nothing a hostile peer sends is believed."""

from __future__ import annotations

import ast
import io
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cluster.image
from cluster.image.bundle import agent_text
from cluster.image.node.blobs import parse_blobs
from cluster.image.node.chain import ssh_command
from cluster.image.node.frames import (
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    Frame,
    FrameError,
    FrameReader,
    pack_data,
    pack_message,
)
from cluster.image.node.keys import KeysError, authorized_line
from cluster.image.node.links import wanted_blobs
from cluster.image.node.loader import Archive

HASH = "ab" * 32


def read_all(data: bytes, chunk: int = 1 << 20) -> list[Frame]:
    """All frames in `data`, which comes in pieces of at most `chunk` bytes."""
    stream = io.BytesIO(data)
    reader = FrameReader(lambda size: stream.read(min(size, chunk)))
    frames = []
    while (frame := reader.next()) is not None:
        frames.append(frame)
    return frames


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
MESSAGES = st.dictionaries(st.text(), VALUES).map(lambda message: {**message, "op": "x"})
DATA = st.tuples(st.integers(0, 65535), st.integers(0, 1 << 50), st.binary(min_size=1, max_size=2000))


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES | DATA, max_size=6), st.integers(1, 64))
def test_frames_come_out_as_they_went_in_however_they_are_cut(items, chunk):
    packed = [pack_message(item) if isinstance(item, dict) else pack_data(*item) for item in items]
    expected = [Frame(item) if isinstance(item, dict) else Frame(None, *item) for item in items]

    assert read_all(b"".join(packed), chunk) == expected


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_frames_are_refused_or_end(data):
    try:
        frames = read_all(data)
    except FrameError:
        return
    assert b"".join(pack_message(f.message) if f.message else pack_data(*f[1:]) for f in frames) is not None


@settings(max_examples=60, deadline=None)
@given(MESSAGES, st.data())
def test_a_stream_that_ends_within_a_frame_is_an_error(message, data):
    packed = pack_message(message)
    cut = data.draw(st.integers(1, len(packed) - 1))

    with pytest.raises(FrameError, match="ended within"):
        read_all(packed[:cut])


class Unread:
    """A stream that gives `head`, and fails the test when more is asked for."""

    def __init__(self, head: bytes) -> None:
        self._head = io.BytesIO(head)

    def __call__(self, size: int) -> bytes:
        data = self._head.read(size)
        assert data, f"{size} bytes were asked for"
        return data


@pytest.mark.parametrize(
    ("kind", "length"),
    [(b"J", MAX_MESSAGE_BYTES + 1), (b"D", MAX_DATA_BYTES + 11), (b"D", 10), (b"D", 0), (b"X", 1), (b"J", 0xFFFFFFFF)],
)
def test_sizes_are_checked_before_anything_is_read(kind, length):
    with pytest.raises(FrameError, match="not a frame"):
        FrameReader(Unread(struct.pack(">cI", kind, length))).next()


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"op":1}', b"{", b"\xff", b"[" * 100_000])
def test_messages_without_an_operation_are_refused(body):
    with pytest.raises(FrameError):
        read_all(struct.pack(">cI", b"J", len(body)) + body)


def test_an_offset_out_of_range_is_refused():
    with pytest.raises(FrameError, match="out of range"):
        read_all(struct.pack(">cIHQ", b"D", 11, 0, 1 << 63) + b"x")


def blob_row(**changes):
    row = {"sha256": HASH, "size": 1, "encoding": "zstd", "diff_id": f"sha256:{HASH}", "unpacked": 1}
    return {**row, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "../../etc/passwd"},
        {"sha256": HASH.upper()},
        {"sha256": f"{HASH}/.."},
        {"sha256": 7},
        {"diff_id": HASH},
        {"diff_id": f"sha256:../{HASH[3:]}"},
        {"size": -1},
        {"size": 1 << 60},
        {"size": "1"},
        {"unpacked": None},
        {"encoding": "xz; rm -rf /"},
    ],
)
def test_blobs_with_names_that_are_no_hashes_or_impossible_sizes_are_refused(changes):
    assert parse_blobs([blob_row()])
    with pytest.raises(FrameError):
        parse_blobs([blob_row(**changes)])


@pytest.mark.parametrize("rows", [None, [1], [{}], [[]] * 70_000])
def test_what_is_no_list_of_blobs_is_refused(rows):
    with pytest.raises(FrameError):
        parse_blobs(rows)


@pytest.mark.parametrize("wanted", [None, 5, [[0]], [[0, -1]], [["a", 1]], [[0, 1, 2]]])
def test_wants_that_make_no_sense_are_refused(wanted):
    with pytest.raises(FrameError):
        wanted_blobs({"op": "want", "blobs": wanted})


@pytest.mark.parametrize(
    "changes", [{"config_name": "../x.json"}, {"layers": ["sha256:../../x"]}, {"layers": None}, {"config": "%%%"}]
)
def test_names_that_lead_out_of_the_archive_are_refused(changes):
    good = {"config": "e30=", "config_name": f"{HASH}.json", "tag": "a:1", "layers": [f"sha256:{HASH}"]}
    assert json.loads(Archive(good).manifest())[0]["Layers"] == [f"{HASH}.tar"]
    with pytest.raises(FrameError):
        Archive({**good, **changes})


@pytest.mark.parametrize(
    "changes", [{"address": "-oProxyCommand=touch /tmp/x"}, {"address": "a b"}, {"user": "-x"}, {"port": 0}]
)
def test_a_next_node_that_would_be_an_option_of_ssh_is_refused(changes):
    target = {"address": "10.0.0.2", "user": "root", "port": 22}
    assert ssh_command(target, "k", "h")[-2:] == ["10.0.0.2", "burst-image-link"]
    with pytest.raises(FrameError):
        ssh_command({**target, **changes}, "k", "h")


@pytest.mark.parametrize("key", ['ssh-x AAAA" command="sh', "ssh-x AAAA\nssh-y BBBB", "nokey", "ssh-x AA AA"])
def test_a_key_that_would_add_options_or_lines_is_refused(key):
    assert authorized_line("ssh-x AAAA", "/dev/shm/x/s", "push-1", "node1").startswith("restrict,command=")
    with pytest.raises(KeysError):
        authorized_line(key, "/dev/shm/x/s", "push-1", "node1")


def is_newer(node: ast.AST) -> bool:
    """Whether this is `list[...]` or `... | None`: both parse as 3.6 and fail there."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id in ("dict", "list", "set", "tuple", "type")
    is_union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
    return is_union and isinstance(node.right, ast.Constant) and node.right.value is None


def test_what_runs_on_nodes_is_python_3_6_with_nothing_but_the_standard_library():
    body = agent_text()
    modules = dict(json.loads(body[10:]))
    imported = set()
    for name, source in modules.items():
        tree = ast.parse(source, name, feature_version=(3, 6))
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "from __future__ import annotations" not in source  # came with 3.7
        assert not [ast.unparse(node) for node in ast.walk(tree) if is_newer(node)]

    assert int(body[:10]) == len(body) - 10
    assert {name for name in imported if name.startswith(("cluster", "engine"))} <= modules.keys()
    present = {path.stem for path in (Path(cluster.image.__file__).parent / "node").glob("[!_]*.py")}
    assert present - {"boot"} <= {name.rpartition(".")[2] for name in modules}  # boot is what unpacks the others
