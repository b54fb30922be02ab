"""Messages between launcher and nodes: what goes in comes out, and nothing a hostile peer sends is believed."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit import PYTHON_PATH

from cluster.agent.messages import MAX_OBJECT_BYTES, READY, Message, MessageError, MessageReader, pack

MOST = 2000


def read_all(data: bytes, chunk: int = 1 << 20) -> list[tuple[Message, bytes]]:
    """All messages in `data`, which comes in pieces of at most `chunk` bytes."""
    stream = io.BytesIO(data)
    reader = MessageReader(lambda size: stream.read(min(size, chunk)), MOST)
    found = []
    while (message := reader.next()) is not None:
        found.append(message)
    return found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
MESSAGES = st.tuples(st.dictionaries(st.text(), VALUES), st.binary(max_size=MOST))


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.integers(1, 64), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut_unless_the_last_one_is_not_whole(messages, chunk, data):
    packed = [pack(*message) for message in messages]
    assert read_all(b"".join(packed), chunk) == messages
    cut = data.draw(st.integers(1, len(packed[-1]) - 1))
    with pytest.raises(MessageError, match="ended within"):
        read_all(b"".join([*packed[:-1], packed[-1][:cut]]), chunk)


@pytest.mark.parametrize(("size", "data_size"), [(MAX_OBJECT_BYTES + 1, 0), (2, MOST + 1), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_sizes_are_checked_before_anything_is_read(size, data_size):
    with pytest.raises(MessageError, match="not a message"):
        read_all(struct.pack(">II", size, data_size))


def test_the_longest_message_is_one_and_a_longer_one_is_not_sent():
    longest = {"x": "a" * (MAX_OBJECT_BYTES - 8)}, bytes(MOST)
    assert read_all(pack(*longest)) == [longest]
    with pytest.raises(MessageError, match="too long"):
        pack({"x": "a" * (MAX_OBJECT_BYTES - 7)})


def test_a_program_answers_in_turn_and_what_it_prints_gets_not_between():
    code = (
        "from cluster.agent.messages import serve\n"
        "serve(lambda asked, data: (print('noise', flush=True) or {'was': asked}, data[::-1]))"
    )
    environment, asked = {**os.environ, "PYTHONPATH": PYTHON_PATH}, pack({"a": 1}, b"xyz") + pack({}, bytes(3 << 20))
    begin = os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], input=asked, env=environment, capture_output=True, timeout=100)
    assert os.times().children_user - begin < 2.0  # in pieces of some size
    assert done.stdout == READY + pack({"was": {"a": 1}}, b"zyx") + pack({"was": {}}, bytes(3 << 20))
    assert (done.stderr, done.returncode) == (b"noise\nnoise\n", 0)


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(MessageError, match="a message is no"):
        read_all(struct.pack(">II", len(body), 0) + body)
