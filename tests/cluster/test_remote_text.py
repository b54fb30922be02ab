"""Text from nodes becomes harmless: no escapes, no control characters, no forged lines, bounded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.remote_text import (
    age_s,
    clean_text,
    clean_value,
    integer,
    number,
    one_line,
    plain_path,
    rows,
    seconds_between,
    table,
    text,
    whole,
    word,
)


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


VALUES = (None, True, 0, 3, -1, 2.5, 3.0, 9e99, 1e100, -1e100, math.nan, "", " 3\n ", "x" * 201, [{}, 3], {"a": 1})


def test_a_value_of_a_record_is_of_the_kind_that_is_asked_for_or_none() -> None:
    kinds: dict[Callable[[Any, str], Any], tuple[Any, dict[int, Any]]] = {
        number: (None, {2: 0, 3: 3, 4: -1, 5: 2.5, 6: 3.0, 7: 9e99}),
        whole: (None, {3: 3, 6: 3, 7: int(9e99)}),
        integer: (None, {2: 0, 3: 3, 4: -1}),
        word: (None, {12: "3", 13: "x" * 200 + "…"}),
        text: (None, {at: str(VALUES[at]) for at in range(1, 12)} | {12: "3", 13: "x" * 200 + "…"}),
        table: ({}, {15: {"a": 1}}),
        rows: ([], {14: [{}]}),
    }
    for read, (none, expected) in kinds.items():
        assert [read({"a": value}, "a") for value in VALUES] == [expected.get(at, none) for at in range(len(VALUES))]
        assert [read(record, "a") for record in ({}, None, ["a"], {"b": 3})] == [none] * 4


def test_texts_are_cut_paths_are_whole_and_values_are_cleaned_all_the_way_down_unless_they_are_too_deep() -> None:
    assert [clean_text("abc", limit=limit) for limit in (3, 2)] == ["abc", "ab…"]
    assert [one_line(raw) for raw in (" " * 300 + "end", "x" * 200, "x" * 201)] == ["end", "x" * 200, "x" * 200 + "…"]
    assert [plain_path(path) for path in ("/", "/a b/c", "/" + "x" * 399)] == ["/", "/a b/c", "/" + "x" * 399]
    for path in (5, "", "a/b", "/a/../b", "/a\nb", "/a  b", "/" + "x" * 400):
        with pytest.raises(ValueError, match="no absolute path"):
            plain_path(path)
    value: Any = {"\x1b[1mk": [1.5, math.inf, True, "\x1b[1mx"], "long": "x" * (2**16 + 1), "x" * 201: "x" * 2**16}
    clean = {"k": [1.5, None, True, "x"], "long": "x" * 2**16 + "…", "x" * 200 + "…": "x" * 2**16}
    for _ in range(9):
        value, clean = {"a": value}, {"a": clean}
    assert clean_value(value) == clean
    with pytest.raises(ValueError, match="too deep"):
        clean_value([value])


def test_times() -> None:
    assert seconds_between("2026-01-01T00:00:00Z", "2026-01-01T00:01:30+00:00") == 90.0
    assert 5.0 <= (seconds_between((datetime.now(UTC) - timedelta(seconds=5)).isoformat()) or 0.0) < 60.0
    assert {seconds_between(*times) for times in ((None, None), ("soon", None), ("2026-01-01", 5))} == {None}
    words = {"90": 90, " 1.5m ": 90, "3s": 3, "2h": 7200, "1d": 86400, "2w": 1209600, "3y": None, "": None}
    assert {word: age_s(word) for word in words} == words
