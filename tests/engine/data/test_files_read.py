"""Which files and rows are read, and what is said of the others."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.sources import Source, open_source


def opened(kind: Any, *paths: Path, **settings: Any) -> Source:
    return open_source(DataConfig(format=kind, paths=tuple(map(str, paths)), **settings))


def texts(source: Source) -> list[str]:
    """The text of each document."""
    found: list[str] = []
    for piece in source.pieces(None):
        found = [*found, piece.text] if piece.begins else [*found[:-1], found[-1] + piece.text]
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
    assert "1 text files; 2 more in these folders skipped" in opened("text", mixed).description


def test_a_named_file_is_read_whatever_its_suffix(mixed: Path) -> None:
    assert texts(opened("text", mixed / "data.odd")) == ["odd"]


def test_suffixes_can_be_chosen(mixed: Path) -> None:
    assert texts(opened("text", mixed, text_suffixes=(".odd",))) == ["odd"]


def test_bad_places_of_all_files_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{bad\n{"other": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(DataError) as caught:
        texts(opened("jsonl", tmp_path))
    for place in ("3 places", "a.jsonl:2: bad JSON", "a.jsonl:3: no key", "b.jsonl:1: 'text' is 5"):
        assert place in str(caught.value), f"{place} is missing"


def test_many_bad_rows_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{bad\n" * 50)
    with pytest.raises(DataError, match="50 places") as caught:
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
