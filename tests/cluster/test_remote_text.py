"""Text from nodes becomes harmless: no escapes, no control characters, no forged lines, bounded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.remote_text import clean_text, one_line


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (b"plain\ttext\r\nnext", "plain\ttext\nnext"),
        (b"\x1b[31;1mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07after", "after"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1b]never ended\nnext line", "\nnext line"),
        (b"\x1bPdevice\x1b\\after", "after"),
        (b"\x1b(Bcharset", "charset"),
        (b"a\x1b\nb", "a\nb"),
        (b"half \xe2\x82", "half \ufffd"),
        (b"bell\x07 null\x00 \x7f", "bell null "),
        ("c1 \x9b31m", "c1 31m"),
        ("right\u202eto left", "rightto left"),
        ("one\u2028two\u2029three\x85four\x0bfive", "onetwothreefourfive"),
        ("half \ud800", "half "),
        (b"[bold]stays[/bold]", "[bold]stays[/bold]"),
    ],
)
def test_what_could_harm_is_taken_out(raw: bytes | str, clean: str) -> None:
    assert clean_text(raw) == clean


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_nothing_that_moves_a_cursor_is_left(raw: bytes | str) -> None:
    text = clean_text(raw)
    assert not any(ord(character) < 32 and character not in "\t\n" for character in text)
    assert "\x1b" not in text
    assert "\x9b" not in text
    text.encode()
    assert clean_text(text) == text
    assert len(text.splitlines()) == len(text.split("\n")) - text.endswith("\n") or not text


@given(st.text(max_size=300), st.integers(0, 50))
def test_one_line_is_one_short_line(raw: str, limit: int) -> None:
    text = one_line(raw, limit)
    assert "\n" not in text
    assert len(text) <= limit + 1


@pytest.mark.parametrize(
    "raw", [b"\x1b[" + b"0" * 4_000_000, b"\x1b]" * 2_000_000, b"\x1b" * 4_000_000, b"\xff" * 4_000_000]
)
def test_megabytes_of_hostile_text_take_no_time(raw: bytes) -> None:
    begin = time.thread_time()  # nothing here waits, and what else the machine does is no matter
    clean_text(raw)
    assert time.thread_time() - begin < 10  # half a second on an idle core
