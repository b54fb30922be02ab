"""Token sets: what is written is read back, and what is damaged is named before it can do harm."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.corpora import write_token_set
from testkit.data_helpers import make_shards, quick

from engine.config.errors import DataError
from engine.data.manifest import Dtype, TokenSetWriter, storage_dtype
from engine.data.shards import echoed, open_token_set
from engine.data.tokenizers import ByteTokenizer, train_bpe


def write_documents(
    folder: Path, documents: list[list[tuple[str, bool]]], *, learns_ends: bool = True
) -> tuple[list[int], list[bool]]:
    """Writes documents of several parts, some of them prompts; returns tokens and mask that must be there."""
    expected: list[int] = []
    prompts: list[bool] = []
    with TokenSetWriter(folder, ByteTokenizer(), learns_ends=learns_ends) as writer:
        for parts in documents:
            for index, (text, is_prompt) in enumerate(parts):
                ids = np.array([*text.encode()], np.int64)
                mask = np.full(ids.size, is_prompt)
                writer.append(ids, mask, ids.size, begins_document=index == 0)
                expected += ids.tolist()
                prompts += mask.tolist()
            expected.append(255)
            prompts.append(not learns_ends)
        writer.finish("made up")
    return expected, prompts


@given(
    documents=st.lists(
        st.lists(st.tuples(st.text("ab€", max_size=9), st.booleans()), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    learns_ends=st.booleans(),
)
@settings(quick, max_examples=20)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[tuple[str, bool]]], learns_ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("set") / "s"
    expected, prompts = write_documents(folder, documents, learns_ends=learns_ends)
    shards = open_token_set(folder)
    for start in range(0, len(expected), 3):
        count = min(7, len(expected) - start)
        assert shards.read(start, count).tolist() == expected[start : start + count]
        assert shards.is_prompt(start, count).tolist() == prompts[start : start + count]
    starts = [0, *(np.flatnonzero(np.array(expected[:-1]) == 255) + 1)]
    assert shards.document_offsets(0, shards.read(0, len(expected))).tolist() == starts
    assert shards.token_count == len(expected)
    assert shards.document_count == len(documents)
    assert shards.text_bytes == sum(len(text.encode()) for parts in documents for text, _ in parts)
    assert (folder / "prompts.bin").exists() == any(prompts)


def test_files_are_little_endian(tmp_path: Path) -> None:
    write_documents(tmp_path / "s", [[("ab", False)], [("c", True)]])
    assert (tmp_path / "s" / "tokens-00000.bin").read_bytes() == b"a\0b\0\xff\0c\0\xff\0"
    assert (tmp_path / "s" / "documents.bin").read_bytes() == bytes([0] * 8 + [3] + [0] * 7)
    assert (tmp_path / "s" / "prompts.bin").read_bytes() == bytes([3] + [0] * 7 + [4] + [0] * 7)
    assert (tmp_path / "s" / "token_bytes.bin").read_bytes() == b"\1\0\0\0" * 255 + b"\0" * 4


def test_manifest_describes_the_files(tmp_path: Path) -> None:
    write_documents(tmp_path / "s", [[("ab", False)], [("c", True)]])
    hashed = hashlib.sha256(b"a\0b\0\xff\0c\0\xff\0").hexdigest()
    assert json.loads((tmp_path / "s" / "manifest.json").read_text()) == {
        **{"format": "burst-tokens", "version": 1, "dtype": "uint16", "vocab_size": 256, "token_count": 5},
        "files": [{"name": "tokens-00000.bin", "token_count": 5, "sha256": hashed}],
        **{"eod_id": 255, "bos_ids": [], "tokenizer": "bytes", "documents_file": "documents.bin", "document_count": 2},
        **{"prompts_file": "prompts.bin", "prompt_count": 1, "token_bytes_file": "token_bytes.bin", "text_bytes": 3},
        **{"counted_bytes": 3, "source": "made up", "writer": "burst"},
    }


def test_ids_are_stored_as_narrow_as_the_vocabulary_allows() -> None:
    assert [storage_dtype(size) for size in (256, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_dtype_is_read_across_files(tmp_path: Path, dtype: str) -> None:
    files = [{"name": "t.bin", "token_count": 3}, {"name": "u.bin", "token_count": 2}]
    np.array([5, 6]).astype(dtype).tofile(tmp_path / "u.bin")
    shards = make_shards(tmp_path, [1, 2, 99], dtype=dtype, files=files, token_count=5)
    assert shards.read(1, 4).tolist() == [2, 99, 5, 6]
    assert shards.read(0, 4).tolist() == [1, 2, 99, 5]


def test_reads_outside_the_tokens_are_errors(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [1, 2, 99, 5, 6])
    for start, count in ((0, 6), (-1, 2), (5, 1)):
        with pytest.raises(IndexError):
            shards.read(start, count)


@pytest.mark.parametrize("named", ["c.npy", "c.json"])
def test_npy_with_a_manifest_beside_it(tmp_path: Path, named: str) -> None:
    np.save(tmp_path / "c.npy", np.arange(50, dtype=np.uint32))
    files = [{"name": "c.npy", "token_count": 50, "note": "unknown keys do no harm"}]
    facts = {"format": "burst-tokens", "version": 1, "dtype": "uint32", "vocab_size": 50, "token_count": 50}
    (tmp_path / "c.json").write_text(json.dumps(facts | {"files": files, "note": "unknown keys do no harm"}))
    assert open_token_set(tmp_path / named).read(48, 2).tolist() == [48, 49]


def test_the_tail_begins_with_a_document_where_the_set_knows_them(tmp_path: Path) -> None:
    head, tail = make_shards(tmp_path / "s", range(20), [0, 5, 12, 18]).split_tail(0.3)  # the last 6 tokens
    assert head.token_count == 18
    assert head.document_count == 3
    assert head.text_bytes is None
    assert tail.read(0, 2).tolist() == [18, 19]
    assert tail.document_count == 1
    assert tail.document_offsets(0, tail.read(0, 2)).tolist() == [0]
    head, tail = make_shards(tmp_path / "t", range(20)).split_tail(0.01)
    assert head.token_count == 19
    assert tail.token_count == 1
    assert tail.read(0, 1).tolist() == [19]
    with pytest.raises(DataError, match="1 tokens cannot be split"):
        make_shards(tmp_path / "u", [1]).split_tail(0.5)


def test_token_bytes_come_from_a_file_or_a_known_tokenizer_or_are_null(tmp_path: Path) -> None:
    np.array([0, 4, 2], dtype="<u4").tofile(tmp_path / "b.bin")
    bpe = train_bpe(["aaaa bbbb " * 20], 270)
    padded = write_token_set(tmp_path / "bpe", [1, 2], vocab_size=300)  # a vocabulary padded to a round size
    bpe.save(padded)
    expected = {
        make_shards(tmp_path, [1, 2], vocab_size=3, token_bytes_file="b.bin"): [0, 4, 2],
        open_token_set(padded): np.pad(bpe.token_bytes(), (0, 300 - bpe.vocab_size)),
        make_shards(tmp_path / "bytes", [1, 255], vocab_size=256, tokenizer="bytes"): [1] * 255 + [0],
        make_shards(tmp_path / "none", [1, 2]): None,
    }
    for shards, sizes in expected.items():
        assert np.array_equal(shards.load_token_bytes(), sizes)  # type: ignore[arg-type]


@given(count=st.integers(1, 60), chunk=st.integers(1, 9), data=st.data())
@quick
def test_echo_repeats_every_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, chunk: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("text")
    np.array([[start, start + 1] for start in range(0, count, 3)], dtype="<i8").tofile(folder / "p.bin")
    shards = echoed(make_shards(folder, range(count), prompts_file="p.bin"), chunk)
    chunks = [list(range(first, first + chunk)) for first in range(0, count - chunk + 1, chunk)]
    expected = np.array([token for one in chunks for token in one + one], dtype=np.int64)
    assert shards.token_count == expected.size
    start = data.draw(st.integers(0, expected.size))
    length = data.draw(st.integers(0, expected.size - start))
    np.testing.assert_array_equal(shards.read(start, length), expected[start : start + length])
    np.testing.assert_array_equal(shards.is_prompt(start, length), expected[start : start + length] % 3 == 0)
    with pytest.raises(IndexError):
        shards.read(start, expected.size - start + 1)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "bad", "offset"),
    [("t.bin", "uint32", 100, 4000), ("t.bin", "int64", -1, 8000), ("t.npy", "uint16", 700, 2128)],
)
def test_an_id_outside_the_vocabulary_is_located(tmp_path: Path, name: str, dtype: str, bad: int, offset: int) -> None:
    ids = [1] * 1000 + [bad, 2]
    folder = write_token_set(tmp_path / "s", ids, dtype=dtype, files=[{"name": name, "token_count": 1002}])
    np.save(folder / "t.npy", np.array(ids).astype(dtype))
    message = rf"{name}: token 1000 \(byte offset {offset}\) is {bad}; expected an id from 0 to 99"
    with pytest.raises(DataError, match=message):
        open_token_set(folder)
    with pytest.raises(DataError, match=message):
        open_token_set(folder, scan_foreign=False).read(995, 7)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin", "token_bytes.bin", "prompts.bin"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [(None, "No such file"), (lambda data: data[:-1], "not a multiple"), (lambda data: data * 2, "holds .* of shape")],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    write_documents(tmp_path / "s", [[("hello", True)]])
    path = tmp_path / "s" / name
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        open_token_set(tmp_path / "s").load_token_bytes()


def file_of(name: str, count: int, **facts: Any) -> dict[str, Any]:
    return {"files": [{"name": name, "token_count": count, **facts}]}


# Changes to the manifest of a set of five tokens, what a file x.npy or x.bin beside it holds, and what is told.
WRONG: list[tuple[dict[str, Any], Any, str]] = [
    (file_of("x.npy", 5), np.zeros((2, 2), np.uint16), r"x\.npy holds uint16 of shape \(2, 2\)"),
    (file_of("x.npy", 5), np.zeros(5, np.float32), "holds float32"),
    (file_of("x.npy", 5), np.zeros(3, np.uint16), r"holds uint16 of shape \(3,\); its manifest states 5"),
    (file_of("x.npy", 5), np.array([None] * 5), r"cannot read .*x\.npy"),
    *(
        ({"documents_file": "x.bin"}, entries, rf"0, that .* the 5 tokens, .* from {place} on are \[{bad}\]")
        for entries, place, bad in (
            ([1, 2], 0, "1, 2"),
            ([-1, 2], 0, "-1, 2"),
            ([0, 5], 1, "5"),
            ([0, 3, 2], 1, "3, 2"),
        )
    ),
    *(
        ({"prompts_file": "x.bin"}, edges, r"x\.bin: expected ranges of prompts that ascend within the 5 tokens")
        for edges in ([3, 3], [5, 2], [0, 9], [-1, 4], [0, 4, 3, 5], [1])
    ),
    ({"version": 2}, None, "version 2; expected 'burst-tokens' version 1"),
    ({"format": None}, None, "format None"),
    ({"dtype": "float32"}, None, "dtype: 'float32' is not a legal value; legal: uint8, uint16"),
    (
        {"vocab_size": None, "eod_id": "x", "tokenizer": 7},
        None,
        "(?s)vocab_size is missing.*eod_id: expected a whole number.*tokenizer: expected text or null",
    ),
    (
        dict.fromkeys(("dtype", "vocab_size", "token_count", "files")),
        None,
        "(?s)dtype is missing.*vocab_size is missing.*token_count is missing.*files is missing",
    ),
    ({"vocab_size": 0}, None, "vocab_size: got 0, expected 1 or more"),
    ({"eod_id": -1}, None, "eod_id: got -1, expected 0 or more"),
    ({"document_count": 0}, None, "document_count: got 0, expected 1 or more"),
    ({"prompt_count": 0}, None, "prompt_count: got 0, expected 1 or more"),
    ({"files": [{"token_count": 5}]}, None, r"files\[0\]\.name is ''"),
    ({"prompts_file": "a/b", "token_bytes_file": ".."}, None, r"(?s)prompts_file is 'a/b'.*token_bytes_file is '\.\.'"),
    ({"token_count": 4}, None, "token_count is 4 but the files add up to 5"),
    (file_of("../t.bin", 5), None, r"files\[0\]\.name is '\.\./t\.bin'"),
    (file_of("\ud800", 5), None, r"files\[0\]\.name is '\\ud800'"),
    (file_of("t.bin", 0), None, r"files\[0\]\.token_count: got 0, expected 1 or more"),
    (file_of("t.bin", 5, sha256=5), None, r"files\[0\]\.sha256: expected text or null"),
    ({"eod_id": 100}, None, "eod_id 100 is not an id below vocab_size 100"),
    ({"bos_ids": [-1]}, None, r"bos_ids\[0\] -1 is not an id below vocab_size 100"),
    ({"documents_file": "/etc/passwd"}, None, "documents_file is '/etc/passwd'"),
]


@pytest.mark.parametrize(("changes", "entries", "message"), WRONG)
def test_sets_that_cannot_be_are_refused_with_all_that_is_wrong(
    tmp_path: Path, changes: dict[str, Any], entries: Any, message: str
) -> None:
    if isinstance(entries, np.ndarray):
        np.save(tmp_path / "x.npy", entries, allow_pickle=True)
    elif entries is not None:
        np.array(entries, dtype="<i8").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=message):
        make_shards(tmp_path, [1, 2, 3, 4, 5], **changes)
