"""Frames between launcher and nodes: what goes in comes out, and nothing a hostile peer sends is believed."""

from __future__ import annotations

import ast
import io
import json
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.code.node.boot import pack_modules
from cluster.image.relays import _MODULES
from cluster.supervise.node.frames import (
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    Frame,
    FrameError,
    FrameReader,
    pack_data,
    pack_message,
)

ROOT = Path(__file__).resolve().parents[3]


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


def test_relays_are_python_3_9_with_nothing_but_the_standard_library():
    modules = dict(json.loads(pack_modules(_MODULES, str(ROOT))))
    imported = set()
    for name, source in modules.items():
        tree = ast.parse(source, name, feature_version=(3, 9))
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {row.name for node in ast.walk(tree) if isinstance(node, ast.Import) for row in node.names}
        assert not [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Match)]

    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} <= modules.keys()
