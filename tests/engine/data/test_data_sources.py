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
from engine.data.sources import find_stdlib_files, open_source
from engine.data.texts import PIECE_BYTES, split_text


def read_all(kind: Any, *paths: Path | str, **settings: Any) -> list[str]:
    config = DataConfig(format=kind, paths=tuple(str(path) for path in paths), **settings)
    return ["".join(part.text for part in parts) for _, parts in open_source(config).documents()]


def test_text_files_are_documents_sorted_by_path_each_once(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second\r\n"), ("a/z.txt", "\ufefffirst ü"), (".hidden", "no"), ("c.md", "third")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert read_all("text", tmp_path) == ["first ü", "second\r\n", "third"]
    assert read_all("text", tmp_path / "b.txt", tmp_path / "?.*") == ["second\r\n", "third"]


@pytest.mark.parametrize("unit", ["ä€😀", "line ü\n", "x"])
def test_long_text_files_come_in_pieces_that_join_to_the_text(tmp_path: Path, unit: str) -> None:
    text = unit * (5 * PIECE_BYTES // (2 * len(unit.encode()))) + "tail"
    (tmp_path / "a.txt").write_bytes(text.encode())
    [(_, pieces)] = open_source(DataConfig(format="text", paths=(str(tmp_path / "a.txt"),))).documents()
    parts = [piece.text for piece in pieces]
    assert "".join(parts) == text
    assert len(parts) >= 2
    assert max(len(part.encode()) for part in parts) <= 2 * PIECE_BYTES


def test_split_text_joins_to_the_text_and_cuts_after_line_breaks() -> None:
    text = ("a" * 1000 + "\n") * 3000
    parts = [part.text for part in split_text(text)]
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts[:-1])
    assert max(map(len, parts)) <= PIECE_BYTES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (before + b"ok\xff tail", rf"invalid UTF-8 at byte offset {len(before) + 2} \(0xff")
            for before in (b"", b"line\n", b"x" * (PIECE_BYTES - 1), b"line\n" * PIECE_BYTES)
        ),
        ("good €".encode()[:-1], "byte offset 5 .*unexpected end of data"),
        (b"\x1f\x8b\x08\x00rest", "unpack it first"),
    ],
    ids=["at once", "in a line", "at the end of a piece", "in a later piece", "cut short", "packed"],
)
def test_what_is_no_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.txt: .*{message}"):
        read_all("text", tmp_path / "bad.txt")


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("text", ["nope1", ".", "nope2"], r"no such file or folder: '.*nope1', '.*nope2'"),
        ("text", ["/dev/null"], "/dev/null is not a regular file"),
        ("jsonl", ["."], r"holds no files to read.*\.jsonl"),
        ("parquet", ["."], r"holds no files to read.*\.parquet"),
    ],
)
def test_paths_without_what_is_read_are_named(tmp_path: Path, kind: str, names: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=message):
        read_all(kind, *(tmp_path / name for name in names))


def test_jsonl_lines_are_documents_and_blank_lines_are_not(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one\ntwo"}), "", json.dumps({"body": "ü", "id": 3})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_all("jsonl", tmp_path, text_field="body") == ["one\ntwo", "ü"]


GOOD_LINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a\.jsonl:2: bad JSON \(.*column 10\)"),
        (b"[" * 100_000, r"a\.jsonl:2: bad JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl:2: bad JSON \(Exceeds the limit"),
        (b'["text"]', r"a\.jsonl:2: a JSON array; expected one JSON object"),
        (b'{"id": 1, "body": "x"}', r"a\.jsonl:2: no key 'text'; keys present: body, id\. Set data\.text_field"),
        (b'{"text": 5}', r"a\.jsonl:2: 'text' is a JSON number; expected a string"),
        (b'{"text": "\xe4"}', r"a\.jsonl:2: invalid UTF-8 at byte offset 27"),
    ],
)
def test_bad_jsonl_is_named_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD_LINE + line + b"\n" + GOOD_LINE)
    with pytest.raises(DataError, match=message):
        read_all("jsonl", tmp_path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_rows_are_documents(tmp_path: Path, kind: Any) -> None:
    texts = [f"row {index} ü" for index in range(600)]
    pq.write_table(pa.table({"id": list(range(600)), "body": pa.array(texts, type=kind)}), tmp_path / "a.parquet")
    assert read_all("parquet", tmp_path, text_field="body") == texts


BROKEN = pa.Array.from_buffers(pa.string(), 1, pa.array([b"ok\xff"]).buffers())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"id": [1], "body": ["x"]}, ": no column 'text'; columns present: id, body"),
        ({"text": [1, 2]}, ": row 0: column 'text' holds int64 1; expected strings"),
        ({"text": ["x"] * 300 + [None]}, ": row 300: column 'text' holds string None"),
        ({"text": BROKEN}, ": row 0: column 'text': invalid UTF-8 at byte offset 2"),
        (b"", " cannot be read as parquet"),
        (b"plain text, not parquet at all", " cannot be read as parquet"),
        (b"PAR1" + b"\x00" * 20 + b"PAR1", " cannot be read as parquet"),
    ],
)
def test_bad_parquet_is_named_with_column_or_row(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "a.parquet").write_bytes(content)
    else:
        pq.write_table(pa.table(content), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet{message}"):
        read_all("parquet", tmp_path)


def make_stdlib(folder: Path) -> Path:
    names = ["os.py", "json/decoder.py", "test/test_os.py", "idlelib/idle_test/a.py", "site-packages/x.py", "latin.py"]
    for name in [*names, "_sysconfigdata__linux.py", "__pycache__/os.py", "os.pyc", "unittest/test/b.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n'\xe4'")
    (folder / "sitecustomize.py").symlink_to(folder / "os.py")
    return folder


def test_stdlib_leaves_out_tests_packages_links_and_what_is_not_utf8(tmp_path: Path) -> None:
    source = open_source(DataConfig(), stdlib_folder=make_stdlib(tmp_path))
    texts = ["".join(part.text for part in parts) for _, parts in source.documents()]
    assert texts == ["# json/decoder.py\n", "# os.py\n"]
    with pytest.raises(DataError, match=r"no source files of its standard library.*data\.format=text"):
        find_stdlib_files(tmp_path / "nowhere")


def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    source = open_source(DataConfig(format="text", paths=(str(path),)))
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        [list(texts) for _, texts in source.documents()]
