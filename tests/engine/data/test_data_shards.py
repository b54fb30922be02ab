"""Token sets: what is written is read back, and what is damaged is named before it can do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import make_shards, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.corpora import write_token_set

from engine.config.errors import DataError
from engine.data.manifest import DTYPES, TokenSetWriter, storage_dtype
from engine.data.shards import open_token_set
from engine.data.tokenizers import ByteTokenizer, train_bpe


def write_documents(folder: Path, documents: list[list[str]], file_tokens: int = 1 << 20) -> list[int]:
    """Writes documents of several parts through the writer; returns the tokens that must be there."""
    tokenizer = ByteTokenizer()
    writer = TokenSetWriter(folder, tokenizer, file_tokens=file_tokens)
    expected: list[int] = []
    for parts in documents:
        for index, part in enumerate(parts):
            writer.append(tokenizer.encode(part), len(part.encode()), ends_document=index == len(parts) - 1)
            expected += part.encode()
        expected.append(tokenizer.eod_id)
    writer.close("made up")
    return expected


@given(
    documents=st.lists(st.lists(st.text("ab€", max_size=9), min_size=1, max_size=3), min_size=1, max_size=4),
    file_tokens=st.integers(2, 12),
)
@settings(quick, max_examples=20)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]], file_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("set") / "s"
    expected = write_documents(folder, documents, file_tokens)
    shards = open_token_set(folder)
    assert shards.token_count == len(expected)
    assert len(shards.manifest.files) == -(-len(expected) // file_tokens)
    for start in range(0, len(expected), 3):
        count = min(7, len(expected) - start)
        assert shards.read(start, count).tolist() == expected[start : start + count]
    starts = [0, *(np.flatnonzero(np.array(expected[:-1]) == 255) + 1)]
    assert shards.document_offsets(0, shards.read(0, len(expected))).tolist() == starts
    assert shards.document_count == len(documents)
    assert shards.text_bytes == sum(len(part.encode()) for parts in documents for part in parts)


def test_files_are_little_endian_and_as_narrow_as_the_vocabulary_allows(tmp_path: Path) -> None:
    write_documents(tmp_path / "s", [["ab"], ["c"]], file_tokens=3)
    assert (tmp_path / "s" / "tokens-00000.bin").read_bytes() == b"a\0b\0\xff\0"
    assert (tmp_path / "s" / "tokens-00001.bin").read_bytes() == b"c\0\xff\0"
    assert (tmp_path / "s" / "documents.bin").read_bytes() == bytes([0] * 8 + [3] + [0] * 7)
    assert [storage_dtype(size) for size in (256, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_and_nothing_past_the_end(tmp_path: Path, dtype: str) -> None:
    shards = make_shards(tmp_path / "s", [1, 2, 99], dtype=dtype)
    assert shards.read(0, 3).tolist() == [1, 2, 99]
    for start, count in ((0, 4), (-1, 2), (3, 1)):
        with pytest.raises(IndexError):
            shards.read(start, count)


@pytest.mark.parametrize("named", ["c.npy", "c.json"])
def test_npy_with_a_manifest_beside_it(tmp_path: Path, named: str) -> None:
    np.save(tmp_path / "c.npy", np.arange(50, dtype=np.uint32))
    files = [{"name": "c.npy", "token_count": 50}]
    facts = {"format": "burst-tokens", "version": 1, "dtype": "uint32", "vocab_size": 50, "token_count": 50}
    (tmp_path / "c.json").write_text(json.dumps(facts | {"files": files, "note": "unknown keys do no harm"}))
    assert open_token_set(tmp_path / named).read(48, 2).tolist() == [48, 49]


def with_documents(folder: Path, tokens: list[int], starts: list[int], **changes: Any) -> Path:
    write_token_set(folder, tokens, documents_file="d.bin", document_count=len(starts), **changes)
    np.array(starts, dtype="<i8").tofile(folder / "d.bin")
    return folder


def test_the_tail_begins_with_a_document(tmp_path: Path) -> None:
    shards = open_token_set(with_documents(tmp_path / "s", list(range(20)), [0, 5, 12, 18]))
    head, tail = shards.split_tail(0.3)  # the last 6 tokens; the next document after token 14 starts at 18
    assert (head.token_count, head.document_count) == (18, 3)
    assert (tail.read(0, 2).tolist(), tail.document_count) == ([18, 19], 1)
    assert tail.document_offsets(0, tail.read(0, 2)).tolist() == [0]


def test_a_set_without_documents_is_cut_by_position_unless_it_has_one_token(tmp_path: Path) -> None:
    head, tail = make_shards(tmp_path / "s", list(range(20))).split_tail(0.01)
    assert (head.token_count, tail.token_count, tail.read(0, 1).tolist()) == (19, 1, [19])
    assert head.text_bytes is None
    with pytest.raises(DataError, match="1 tokens cannot be split"):
        make_shards(tmp_path / "s", [1]).split_tail(0.5)


def test_token_bytes_come_from_a_file_or_a_known_tokenizer_or_are_null(tmp_path: Path) -> None:
    folder = write_token_set(tmp_path / "file", [1, 2], vocab_size=3, token_bytes_file="b.bin")
    np.array([0, 4, 2], dtype="<u4").tofile(folder / "b.bin")
    bpe = train_bpe(["aaaa bbbb " * 20], 270)
    padded = write_token_set(tmp_path / "bpe", [1, 2], vocab_size=300)  # a vocabulary padded to a round size
    bpe.save(padded)
    plain = write_token_set(tmp_path / "bytes", [1, 255], vocab_size=256, tokenizer="bytes")
    assert np.array_equal(open_token_set(folder).load_token_bytes(), [0, 4, 2])
    expected = np.pad(bpe.token_bytes(), (0, 300 - bpe.vocab_size))
    assert np.array_equal(open_token_set(padded).load_token_bytes(), expected)
    assert np.array_equal(open_token_set(plain).load_token_bytes(), [1] * 255 + [0])
    assert make_shards(tmp_path / "none", [1, 2]).load_token_bytes() is None


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "bad", "offset"),
    [("t.bin", "uint32", 100, 4000), ("t.bin", "int64", -1, 8000), ("t.npy", "uint16", 700, 2128)],
)
def test_an_id_outside_the_vocabulary_is_named_with_file_and_offset(
    tmp_path: Path, name: str, dtype: str, bad: int, offset: int
) -> None:
    ids = [1] * 1000 + [bad, 2]
    folder = write_token_set(tmp_path / "s", ids, dtype=dtype, files=[{"name": name, "token_count": 1002}])
    np.save(folder / "t.npy", np.array(ids).astype(dtype))
    message = rf"{name}: token 1000 \(byte offset {offset}\) is {bad}; expected an id from 0 to 99"
    with pytest.raises(DataError, match=message):
        open_token_set(folder)
    with pytest.raises(DataError, match=message):
        open_token_set(folder, scan_foreign=False).read(995, 7)


def test_a_file_cut_short_is_named_with_both_sizes(tmp_path: Path) -> None:
    folder = write_token_set(tmp_path / "s", list(range(10)))
    (folder / "t.bin").write_bytes((folder / "t.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"t\.bin has 19 bytes; its manifest says 10 entries of uint16 = 20 bytes"):
        open_token_set(folder)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin", "token_bytes.bin", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_documents(tmp_path / "s", [["hello"]])
    (tmp_path / "s" / name).unlink()
    with pytest.raises(DataError, match=f"cannot read .*{name}: No such file|no manifest at .*{name}"):
        open_token_set(tmp_path / "s").load_token_bytes()


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([1, 2], "first document starts at 1 and the last at 2; expected 0 and less than the 5 tokens"),
        ([0, 5], "the last at 5"),
        ([0, 3, 2, 4], r"d\.bin: entry 2 \(byte offset 16\) is not above the one before it"),
    ],
)
def test_impossible_document_starts_are_refused(tmp_path: Path, starts: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_token_set(with_documents(tmp_path / "s", [1, 2, 3, 4, 5], starts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2; expected 'burst-tokens' version 1"),
        ({"format": None}, "format None"),
        ({"dtype": "float32"}, "dtype: 'float32' is not a legal value; legal: uint8, uint16"),
        (
            {"vocab_size": None, "eod_id": "x", "tokenizer": 7},
            "(?s)vocab_size is missing.*eod_id: expected a whole number.*tokenizer: expected text or null",
        ),
        ({"token_count": 4}, "token_count is 4 but the files add up to 3"),
        ({"files": [{"name": "../t.bin", "token_count": 3}]}, r"files\[0\]\.name is '\.\./t\.bin'"),
        ({"files": [{"name": "\ud800", "token_count": 3}]}, r"files\[0\]\.name is '\\ud800'"),
        ({"files": [{"name": "t.bin", "token_count": 0}]}, r"files\[0\]\.token_count: got 0, expected 1 or more"),
        ({"files": [{"name": "t.bin", "token_count": 3, "sha256": 5}]}, r"files\[0\]\.sha256: expected text or null"),
        ({"eod_id": 100}, "eod_id 100 is not an id below vocab_size 100"),
        ({"bos_ids": [-1]}, r"bos_ids\[0\] -1 is not an id below vocab_size 100"),
        ({"documents_file": "/etc/passwd"}, "documents_file is '/etc/passwd'"),
    ],
)
def test_wrong_manifests_say_all_that_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_shards(tmp_path / "s", [1, 2, 3], **changes)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.uint16), r"holds uint16 of shape \(2, 2\)"),
        (np.zeros(4, np.float32), "holds float32"),
        (np.zeros(3, np.uint16), "holds 3 tokens but its manifest says 4"),
        (np.array([None] * 4), "cannot be read as .npy"),
    ],
)
def test_npy_files_that_do_not_fit_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    folder = write_token_set(tmp_path / "s", [1, 2, 3, 4], files=[{"name": "t.npy", "token_count": 4}])
    np.save(folder / "t.npy", array, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        open_token_set(folder)
