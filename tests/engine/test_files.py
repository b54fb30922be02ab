"""Files that are replaced whole and folders that appear whole, whatever fails on the way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.runs.files import cache_folder, new_folder, replace_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("own", "base", "found"),
    [("", "", "/h/.cache/burst"), ("", "/c", "/c/burst"), ("", "c", "/h/.cache/burst"), ("~/o", "/c", "/h/o")],
)
def test_the_cache_lies_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, own: str, base: str, found: str
) -> None:
    for name, value in (("HOME", "/h"), ("BURST_CACHE_DIR", own), ("XDG_CACHE_HOME", base)):
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(found)


def test_a_failed_replacement_keeps_the_old_content_and_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnicodeEncodeError):
        replace_file(tmp_path / "a", "\udcff")
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", "new")
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which renaming would take away from everybody
    with pytest.raises(FileExistsError, match="no regular file"):
        replace_file(tmp_path / "pipe", "new")
    assert names(tmp_path) == ["a", "folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_is_its_owners_alone_unless_it_is_shared(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "own", "x")
        replace_file(tmp_path / "shared", b"x", is_shared=True)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "shared")]
    assert modes == [0o600, 0o640]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "deep/er/a") as work:
        {}[(work / "part").write_text("half")]
    assert names(tmp_path) == []
    with new_folder(tmp_path / "a") as work:
        (work / "part").write_text("whole")
    assert names(tmp_path) == ["a"]
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "a/part").read_text() == "whole"
    assert names(tmp_path) == ["a"]
