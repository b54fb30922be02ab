"""Which files and rows are read, and what is said of the others."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.prepare import prepare, skipped_rows
from engine.data.sources import Source, open_source


def opened(kind: Any, *paths: Path, **settings: Any) -> Source:
    return open_source(DataConfig(format=kind, paths=tuple(map(str, paths)), **settings))


def texts(source: Source) -> list[str]:
    """The text of each document."""
    found: list[str] = []
    for chunk in source.chunks(None):
        found = [*found, chunk.text] if chunk.begins else [*found[:-1], found[-1] + chunk.text]
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("read")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    (tmp_path / "data.odd").write_text("odd")
    return tmp_path


def test_a_folder_gives_only_files_with_text_suffixes(mixed: Path) -> None:
    assert texts(opened("text", mixed)) == ["read"]


def test_skipped_files_are_counted(mixed: Path) -> None:
    assert "1 text file; 2 more in these folders skipped" in opened("text", mixed).description


def test_a_named_file_is_read_whatever_its_suffix(mixed: Path) -> None:
    assert texts(opened("text", mixed / "data.odd")) == ["odd"]


def test_suffixes_can_be_chosen(mixed: Path) -> None:
    assert texts(opened("text", mixed, text_suffixes=(".odd",))) == ["odd"]


@pytest.mark.parametrize(
    "row",
    ['{"text": "a", "text": "b"}', '{"text": "a", "meta": [{"k": 1, "j": 2, "k": 1}]}'],
    ids=["row", "object inside"],
)
def test_a_key_given_twice_in_a_row_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + row + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*the key '(text|k)' is given twice"):
        texts(opened("jsonl", tmp_path))


def test_a_row_with_a_key_twice_is_left_out_by_on_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "a", "text": "b"}\n')
    assert texts(opened("jsonl", tmp_path, on_bad_row="skip")) == ["x"]


def test_bad_rows_of_all_files_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{bad\n{"other": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(DataError) as caught:
        texts(opened("jsonl", tmp_path))
    for place in ("3 parts", "a.jsonl:2: bad JSON", "a.jsonl:3: no key", "b.jsonl:1: 'text' is 5"):
        assert place in str(caught.value), f"{place} is missing"


def test_many_bad_rows_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{bad\n" * 50)
    with pytest.raises(DataError, match="50 parts") as caught:
        texts(opened("jsonl", tmp_path))
    assert "and 30 more" in str(caught.value)


def test_gzip_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert texts(opened("jsonl", tmp_path)) == ["packed"]


@pytest.mark.parametrize(("name", "message"), [("a.jsonl.zst", "compressed .*Unpack"), ("a.jsonl.gz", "gzip")])
def test_other_archives_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(DataError, match=message):
        texts(opened("jsonl", tmp_path / name))


CHATS = """{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
{"messages": [{"role": "user", "content": "nobody answers"}]}
{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}
"""


def test_on_bad_row_skip_counts_the_rows_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    rows = b'{"text": "one"}\n{bad\n{"other": 1}\n{"text": 5}\n{"text": "\xff"}\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(rows)
    made = prepare(DataConfig(format="jsonl", paths=(str(tmp_path / "a.jsonl"),), on_bad_row="skip"))
    found = skipped_rows(made.path)
    assert found is not None, "prepared.json does not say what was left out"
    assert found["count"] == 4
    assert len(found["first"]) == 4
    assert (made.train.text_bytes or 0) + (made.validation.text_bytes or 0) == len("onetwo")


def test_conversations_that_cannot_be_used_are_left_out_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(CHATS)
    how = {"messages_field": "messages", "chat_template": "chatml", "on_bad_row": "skip"}
    assert len(texts(opened("jsonl", tmp_path, **how))) == 1


def test_a_text_file_with_a_bad_end_is_skipped_completely(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 500_000 + b"\xff")
    (tmp_path / "b.txt").write_text("good")
    assert texts(opened("text", tmp_path, on_bad_row="skip")) == ["good"]


def test_data_of_bad_rows_alone_is_refused_even_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{bad\n" * 2)
    with pytest.raises(DataError, match="no row is left"):
        texts(opened("jsonl", tmp_path, on_bad_row="skip"))


def test_a_damaged_file_is_no_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "y"}\n' * 9)[:-9])
    with pytest.raises(DataError, match="not a whole gzip file"):
        texts(opened("jsonl", tmp_path, on_bad_row="skip"))


def test_a_bad_row_before_the_end_of_max_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{bad\n{"text": "xyz"}\n{"text": "more"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: bad JSON"):
        list(opened("jsonl", tmp_path).chunks(2))


def test_bad_rows_of_parquet_are_listed_together(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None, "b", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"(?s)row 1.*row 3"):
        texts(opened("parquet", tmp_path))
    assert texts(opened("parquet", tmp_path, on_bad_row="skip")) == ["a", "b"]


def test_chatml_names_the_tool_calls_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(CHATS.splitlines()[2] + "\n")
    with pytest.raises(DataError, match=r"no form for tool_calls of message 1.*the template of the model"):
        texts(opened("jsonl", tmp_path, messages_field="messages", chat_template="chatml"))


def test_a_sharegpt_row_is_refused_with_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"conversations": [{"from": "human", "value": "hi"}]}\n')
    source = opened("jsonl", tmp_path, messages_field="conversations", chat_template="chatml")
    with pytest.raises(DataError, match=r"a\.jsonl:1: message 0 .*ShareGPT.*becomes role \(human: user"):
        texts(source)
