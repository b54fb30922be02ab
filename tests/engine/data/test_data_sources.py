"""Sources: what they read, in which order, and how precisely they name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.sources import PIECE_BYTES, Piece, open_source, split_text, stdlib_files


def read_all(kind: Any, *paths: Path | str, **settings: Any) -> list[list[str]]:
    """The pieces of every document."""
    config = DataConfig(format=kind, paths=tuple(str(path) for path in paths), **settings)
    found: list[list[str]] = []
    for piece in open_source(config).pieces(None):
        found += [[]] if piece.begins else []
        found[-1].append(piece.text)
    return found


def test_text_files_are_documents_sorted_by_path_each_once(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second\r\n"), ("a/z.txt", "\ufefffirst ü"), (".hidden", "no"), ("c.md", "third")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert [*map("".join, read_all("text", tmp_path))] == ["first ü", "second\r\n", "third"]
    assert [*map("".join, read_all("text", tmp_path / "b.txt", tmp_path / "?.*"))] == ["second\r\n", "third"]


@pytest.mark.parametrize("unit", ["ä€😀", "line ü\n", "x"])
def test_long_text_comes_in_pieces_that_join_to_it(tmp_path: Path, unit: str) -> None:
    text = unit * (5 * PIECE_BYTES // (2 * len(unit.encode()))) + "tail"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for kind, size in (("text", lambda part: len(part.encode())), ("jsonl", len)):
        [parts] = read_all(kind, tmp_path / ("a.txt" if kind == "text" else "a.jsonl"))
        assert "".join(parts) == text
        assert len(parts) >= 2 or len(text) < PIECE_BYTES
        assert max(map(size, parts)) <= 2 * PIECE_BYTES
        assert "\n" not in unit or all(part.endswith("\n") for part in parts[:-1])
    assert [*split_text("x", ())] == [Piece("x", ())]


def test_records_are_documents_and_blank_lines_are_not(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one\ntwo"}), "", json.dumps({"body": "ü", "title": "cut \ud83d"})]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines))
    assert read_all("jsonl", tmp_path, text_field="body") == [["one\ntwo"], ["ü"]]
    texts = [f"row {index} ü" for index in range(600)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"id": list(range(600)), "body": pa.array(texts, type=kind)}), tmp_path / "a.parquet")
        assert read_all("parquet", tmp_path, text_field="body") == [[text] for text in texts]


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("text", [".", "nope"], r"no such file or folder: '.*nope'"),
        ("text", ["/dev/null"], "no such file or folder: '/dev/null'.* Name regular files"),
        ("jsonl", ["."], r"holds no files to read.*\.jsonl"),
        ("parquet", ["*.pq"], r"holds no files to read.*\.parquet"),
    ],
)
def test_paths_without_what_is_read_are_named(tmp_path: Path, kind: str, names: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        read_all(kind, *(tmp_path / name for name in names))


GOOD_LINE = b'{"text": "fine"}\n'
BROKEN = pa.Array.from_buffers(pa.string(), 1, pa.array([b"ok\xff"]).buffers())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            ("a.txt", before + b"ok\xff tail", rf"a\.txt: invalid UTF-8 at byte offset {len(before) + 2} ")
            for before in (b"", b"line\n", b"x" * (PIECE_BYTES - 1), b"line\n" * PIECE_BYTES)
        ),
        ("a.txt", "good €".encode()[:-1], "byte offset 5 .*unexpected end of data"),
        ("a.txt", b"\x1f\x8b\x08\x00rest", "unpack it if it is compressed"),
        ("a.jsonl", b'{"text": "cut', r"a\.jsonl:2: bad JSON \(.*column 10 "),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:2: bad JSON"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:2: bad JSON \(Exceeds the limit"),
        ("a.jsonl", b'["text"]', r"a\.jsonl:2: .* is no object; expected one JSON object"),
        ("a.jsonl", b'{"id": 1, "body": "x"}', r"a\.jsonl:2: no key 'text'; keys present: body, id\. Set data\.text_"),
        (
            "a.jsonl",
            rb'{"text": "ab\ud800c"}',
            r"a\.jsonl:2: bad JSON \('utf-8' codec can't encode .*surrogates not allowed",
        ),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl:2: 'text' is 5; expected a string"),
        ("a.jsonl", b'{"text": "\xe4"}', r"a\.jsonl:2: bad JSON \('utf-8' codec can't decode byte 0xe4 in position 10"),
        ("a.parquet", {"id": [1], "body": ["x"]}, r"a\.parquet: no key 'text'; keys present: body, id"),
        ("a.parquet", {"text": [1, 2]}, r"a\.parquet: row 0: 'text' is 1; expected a string"),
        ("a.parquet", {"text": ["x"] * 300 + [None]}, "a.parquet: row 300: 'text' is None"),
        ("a.parquet", {"text": BROKEN}, r"a\.parquet cannot be read .* from row 0 on: 'utf-8' codec can't decode"),
        *(
            ("a.parquet", content, r"a\.parquet cannot be read as parquet")
            for content in (b"", b"plain text, not parquet at all", b"PAR1" + b"\x00" * 20 + b"PAR1")
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(GOOD_LINE + content + b"\n" if name == "a.jsonl" else content)
    else:
        pq.write_table(pa.table(content), tmp_path / name)
    with pytest.raises(DataError, match=message):
        read_all({"a.txt": "text"}.get(name, name[2:]), tmp_path / name)


def test_stdlib_leaves_out_tests_packages_links_and_what_is_not_utf8(tmp_path: Path) -> None:
    names = ["os.py", "json/decoder.py", "test/test_os.py", "idlelib/idle_test/a.py", "site-packages/x.py", "latin.py"]
    for name in [*names, "_sysconfigdata__linux.py", "__pycache__/os.py", "os.pyc", "unittest/test/b.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "os.py")
    assert [str(path.relative_to(tmp_path)) for path in stdlib_files(tmp_path)] == [
        "json/decoder.py",
        "latin.py",
        "os.py",
    ]
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n'\xe4'")
    assert list(open_source(DataConfig()).read(tmp_path / "latin.py")) == []
