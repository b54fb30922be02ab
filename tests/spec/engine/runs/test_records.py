from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.files import JsonLinesTail, append_json_line, read_json_object


def test_tail_returns_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonLinesTail(path)
    assert tail.poll() == []
    path.write_bytes(b'{"a": 1}\n')
    assert tail.poll() == [{"a": 1}]
    assert tail.poll() == []


def test_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonLinesTail(path)
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert tail.poll() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b"\n")
    assert tail.poll() == [{"a": 2}]


def test_tail_starts_over_with_a_shorter_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonLinesTail(path)
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail.poll()
    path.write_text('{"b": 1}\n')
    assert tail.poll() == [{"b": 1}]


def test_appended_lines_hold_one_object_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_json_line(path, {"text": "two\nlines", "path": Path("x"), "a": [1.0, {"b": float("-inf")}]})
    append_json_line(path, {"n": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"text": "two\nlines", "path": "x", "a": [1.0, {"b": None}]},
        {"n": None},
    ]


def test_lines_that_no_reader_could_bear_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    most, more = "9" * 38, "9" * 39
    longest = f'{{"a": "{"x" * ((16 << 20) - 9)}"}}'
    odd = "[" * 100_000 + f'\n{{"step": {more}, "loss": {most}}}\n' + "x" * (40 << 20)
    path.write_text(f'{longest}\n{odd}\n{{"a": 1}}\n')
    assert JsonLinesTail(path).poll()[1:] == [{"step": None, "loss": int(most)}, {"a": 1}]
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json_object(path)


def test_of_a_long_file_the_end_is_followed_from_a_whole_row_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"step": 1{step:03}1}}\n' for step in range(100)))
    tail = JsonLinesTail(path, last_bytes=40)
    assert [row["step"] for row in tail.poll()] == [10981, 10991]
    append_json_line(path, {"step": 1001})
    assert tail.poll() == [{"step": 1001}]
    assert [len(JsonLinesTail(path, size).poll()) for size in (path.stat().st_size, 10_000)] == [101, 101]
