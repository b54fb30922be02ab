"""Sources: what they read, in which order, how precisely they name what is wrong; and which of it validates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.data_helpers import quick

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.build import TRAIN, VALIDATION, split, survey
from engine.data.sources import CHUNK_BYTES, Document, Source, TextChunk, open_source, stdlib_files


def documents(chunks: Iterable[TextChunk]) -> list[list[str]]:
    """The texts of the chunks of each."""
    found: list[list[str]] = []
    for chunk in chunks:
        found += [[]] if chunk.begins else []
        found[-1].append(chunk.text)
    return found


def read_all(kind: Any, *paths: Path | str, **settings: Any) -> list[list[str]]:
    config = DataConfig(format=kind, paths=tuple(str(path) for path in paths), **settings)
    return documents(open_source(config).chunks(None))


def test_text_files_are_documents_sorted_by_path_each_once(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second\r\n"), ("a/z.txt", "\ufefffirst ü"), (".hidden", "no"), ("c.md", "third")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert [*map("".join, read_all("text", tmp_path))] == ["first ü", "second\r\n", "third"]
    assert [*map("".join, read_all("text", tmp_path / "b.txt", tmp_path / "?.*"))] == ["second\r\n", "third"]


@pytest.mark.parametrize("unit", ["ä€😀", "line ü\n", "x"])
def test_long_text_is_read_in_chunks_that_join_to_it(tmp_path: Path, unit: str) -> None:
    text = unit * (5 * CHUNK_BYTES // (2 * len(unit.encode()))) + "tail"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for kind, size in (("text", lambda part: len(part.encode())), ("jsonl", len)):
        [parts] = read_all(kind, tmp_path / ("a.txt" if kind == "text" else "a.jsonl"))
        assert "".join(parts) == text
        assert len(parts) >= 2 or len(text) < CHUNK_BYTES
        assert max(map(size, parts)) <= 2 * CHUNK_BYTES
        assert "\n" not in unit or all(part.endswith("\n") for part in parts[:-1])


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one\ntwo"}), "", json.dumps({"body": "ü", "title": "cut \ud83d"})]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines))
    (tmp_path / "b.ndjson").write_text('{"body": "last"}')
    assert read_all("jsonl", tmp_path, text_field="body") == [["one\ntwo"], ["ü"], ["last"]]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    texts = [f"row {index} ü" for index in range(600)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"id": list(range(600)), "body": pa.array(texts, type=kind)}), tmp_path / "a.parquet")
        assert read_all("parquet", tmp_path, text_field="body") == [[text] for text in texts]


GOOD_LINE = b'{"text": "fine"}\n'
BROKEN = pa.Array.from_buffers(pa.string(), 1, pa.array([b"ok\xff"]).buffers())


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("text", "nope", None, r"no such file or folder: '.*nope'"),
        ("text", "/dev/null", None, "no such file or folder: '/dev/null'.* Name regular files"),
        ("jsonl", ".", None, r"holds no files to read.*\.jsonl"),
        ("parquet", "*.pq", None, r"holds no files to read.*\.parquet"),
        *(
            ("text", "a.txt", before + b"ok\xff tail", rf"a\.txt: invalid UTF-8 at byte offset {len(before) + 2} ")
            for before in (b"", b"line\n", b"x" * (CHUNK_BYTES - 1), b"line\n" * CHUNK_BYTES)
        ),
        ("text", "a.txt", "good €".encode()[:-1], "byte offset 5 .*unexpected end of data"),
        ("text", "a.txt", b"\x1f\x8b\x08\x00rest", "unpack it if it is compressed"),
        *(
            ("jsonl", "a.jsonl", line, rf"a\.jsonl:2: {message}")
            for line, message in (
                (b'{"text": "cut', r"bad JSON \(.*column 10 "),
                (b"[" * 100_000, "bad JSON"),
                (b'{"text": ' + b"1" * 5000 + b"}", r"bad JSON \(Exceeds the limit"),
                (b'["text"]', ".* is no object; expected one JSON object"),
                (b'{"id": 1, "body": "x"}', r"no key 'text'; keys present: body, id\. Set data\.text_"),
                (rb'{"text": "ab\ud800c"}', r"bad JSON \('utf-8' codec can't encode .*surrogates not allowed"),
                (b'{"text": 5}', "'text' is 5; expected a string"),
                (b'{"text": "\xe4"}', r"bad JSON \('utf-8' codec can't decode byte 0xe4 in position 10"),
            )
        ),
        *(
            ("parquet", "a.parquet", content, rf"a\.parquet{message}")
            for content, message in (
                ({"id": [1], "body": ["x"]}, ": no key 'text'; keys present: body, id"),
                ({"text": [1, 2]}, ": row 0: 'text' is 1; expected a string"),
                ({"text": ["x"] * 300 + [None]}, ": row 300: 'text' is None"),
                ({"text": BROKEN}, ": row 0: invalid UTF-8"),
                (b"", " cannot be read as parquet"),
                (b"plain text, not parquet at all", " cannot be read as parquet"),
                (b"PAR1" + b"\x00" * 20 + b"PAR1", " cannot be read as parquet"),
            )
        ),
    ],
)
def test_unreadable_data_are_named_with_their_position(
    tmp_path: Path, kind: str, name: str, content: Any, message: str
) -> None:
    (tmp_path / "other.txt").write_text("x")
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(GOOD_LINE + content + b"\n" if kind == "jsonl" else content)
    elif content is not None:
        pq.write_table(pa.table(content), tmp_path / name)
    with pytest.raises(DataError, match=message):
        read_all(kind, *([tmp_path] if name == "nope" else []), tmp_path / name)


def test_stdlib_leaves_out_files_that_differ_between_machines(tmp_path: Path) -> None:
    names = ["os.py", "json/decoder.py", "test/test_os.py", "idlelib/idle_test/a.py", "site-packages/x.py", "latin.py"]
    names += ["ensurepip/_bundled/p.py", "lib2to3/tests/t.py", "dist-packages/y.py", "unittest/test/b.py"]
    for name in [*names, "_sysconfigdata__linux.py", "__pycache__/os.py", "os.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "os.py")
    found = [str(path.relative_to(tmp_path)) for path in stdlib_files(tmp_path)]
    assert found == ["json/decoder.py", "latin.py", "os.py"]


def test_stdlib_file_of_another_encoding_is_empty(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n'\xe4'")
    assert list(open_source(DataConfig()).read(tmp_path / "latin.py")) == []


# --- chunks and sides -------------------------------------------------------------------------------------------------

parts = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=3)
fractions = st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9, 0.999])


def make_pieces(*texts: str | Iterable[str], max_bytes: int | None = None) -> list[TextChunk]:
    """What a source gives of documents, each a text or the texts of its chunks."""

    def read(path: Path) -> Iterator[Document]:
        for text in texts:
            yield map(TextChunk, [text] if isinstance(text, str) else text)

    return list(Source("made up", (Path("made-up"),), read).chunks(max_bytes))


@given(parts, st.integers(1, 100))
@quick
def test_max_bytes_is_exact_up_to_a_whole_character(texts: list[str], limit: int) -> None:
    chunks = make_pieces(*texts, max_bytes=limit)
    expected = "".join(texts).encode()[:limit].decode(errors="ignore")
    assert "".join(chunk.text for chunk in chunks) == expected
    assert all(chunk.begins and chunk.text for chunk in chunks)


def test_nothing_is_read_past_max_bytes() -> None:
    def texts_with_a_trap() -> Iterator[str]:
        yield "12345"
        raise AssertionError("read past the limit")

    assert documents(make_pieces("abc", texts_with_a_trap(), max_bytes=8)) == [["abc"], ["12345"]]


def test_empty_documents_are_left_out() -> None:
    assert documents(make_pieces("", "a", ["", ""], ["", "b", "", "c"])) == [["a"], ["b", "c"]]


def sides_of(chunks: Sequence[TextChunk], fraction: float) -> list[list[TextChunk]]:
    """[what trains, what validates]."""
    sides = list(split(chunks, *survey(chunks), fraction))
    return [[chunk for side, chunk in sides if side == name] for name in (TRAIN, VALIDATION)]


def size(chunks: Iterable[TextChunk]) -> int:
    return sum(len(chunk.data) for chunk in chunks)


@given(st.lists(parts, min_size=2, max_size=30), fractions)
@quick
def test_neither_split_is_empty(texts: list[list[str]], fraction: float) -> None:
    train, validation = map(documents, sides_of(make_pieces(*texts), fraction))
    assert train
    assert validation


@given(st.lists(parts, min_size=2, max_size=30), fractions)
@quick
def test_every_document_is_whole_in_one_split(texts: list[list[str]], fraction: float) -> None:
    train, validation = map(documents, sides_of(make_pieces(*texts), fraction))
    assert sorted(train + validation) == sorted(texts)


def test_validation_has_its_fraction_of_the_text() -> None:
    chunks = make_pieces(*(f"document {index} " * 5 for index in range(2000)))
    share = size(sides_of(chunks, 0.05)[1]) / size(chunks)
    assert 0.05 <= share <= 0.05 + 3 / 2000  # a hash value of 16 bits rarely has more than a few documents


def test_equal_documents_are_on_one_side() -> None:
    texts = [f"text {index % 50}" for index in range(100)]
    train, validation = ({chunk.text for chunk in side} for side in sides_of(make_pieces(*texts), 0.2))
    assert not train & validation


def test_order_of_documents_does_not_change_their_side() -> None:
    texts = [f"text {index % 50}" for index in range(100)]
    sides = [{chunk.text for chunk in sides_of(make_pieces(*order), 0.2)[1]} for order in (texts, texts[::-1])]
    assert sides[0] == sides[1]


def test_validation_of_one_repeated_document_is_one_copy() -> None:
    assert [len(side) for side in sides_of(make_pieces(*["same"] * 10), 0.1)] == [9, 1]


def test_validation_of_two_equal_halves_is_the_lower_hash() -> None:
    for halves in ([f"half {index}", f"rest {index}"] for index in range(9)):
        lower = min(halves, key=lambda text: blake2b(text.encode(), digest_size=2).digest())
        assert [chunk.text for chunk in sides_of(make_pieces(*halves), 0.1)[1]] == [lower]


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_a_document_with_most_of_the_text_always_trains(fraction: float) -> None:
    for index in range(50):
        huge = f"huge {index} " * 1000
        assert huge in [chunk.text for chunk in sides_of(make_pieces("one", huge, f"small {index}"), fraction)[0]]


@given(st.lists(st.text("aé€😀", min_size=1, max_size=9), min_size=1, max_size=6), fractions)
@quick
def test_a_single_document_is_cut_by_position(texts: list[str], fraction: float) -> None:
    chunks = make_pieces(texts)
    train, validation = sides_of(chunks, fraction)
    assert "".join(chunk.text for chunk in [*train, *validation]) == "".join(texts)
    wanted = max(1, round(size(chunks) * fraction))
    assert wanted <= size(validation) <= wanted + 3  # the cut moves back to the start of a character
    assert [len(documents(side)) for side in (train, validation) if side] == [1] * (1 + bool(train))
