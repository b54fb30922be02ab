"""Files that are replaced whole and folders that appear whole, whatever fails on the way."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest

from engine.config.errors import BurstError
from engine.config.schema import hash_json
from engine.runs.files import cache_folder, new_folder, replace_file, replace_json, require_json_object, sync


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("own", "base", "found"),
    [("", "", "/h/.cache/burst"), ("", "/c", "/c/burst"), ("", "c", "/h/.cache/burst"), ("~/o", "/c", "/h/o")],
)
def test_the_cache_is_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, own: str, base: str, found: str
) -> None:
    for name, value in (("HOME", "/h"), ("BURST_CACHE_DIR", own), ("XDG_CACHE_HOME", base)):
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(found)


def test_failed_replacement_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(tmp_path / "a", "\udcff")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", "new")
    assert names(tmp_path) == ["folder"]


def test_special_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which renaming would take away from every program
    with pytest.raises(FileExistsError, match="no regular file"):
        replace_file(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_file_on_no_disk_cannot_be_synced() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        sync(Path("/dev/null"))


def test_a_file_is_its_owners_alone_unless_it_is_shared(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "own", "x")
        replace_file(tmp_path / "shared", b"x", is_shared=True)
        with new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "shared", "folder")]
    assert modes == [0o600, 0o640, 0o750]


def test_a_value_that_is_no_object_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("[1]")
    told = {"gone": "is missing", "list": "cannot be read: expected a JSON object, found list"}
    for name, reason in (told | {"": "cannot be read: Is a directory"}).items():
        with pytest.raises(BurstError) as caught:
            require_json_object(tmp_path / name, "a plan", BurstError)
        assert str(caught.value) == f"{tmp_path / name} {reason}; expected a plan"


def test_json_files_are_indented(tmp_path: Path) -> None:
    replace_json(tmp_path / "a", {"ü": Path("x"), "b": [math.nan]})
    assert (tmp_path / "a").read_text() == '{\n  "\\u00fc": "x",\n  "b": [\n    null\n  ]\n}\n'


def test_hash_of_json_does_not_depend_on_order() -> None:
    assert hash_json({"a": 1, "b": 2}) == hash_json({"b": 2, "a": 1})


def test_a_new_folder_is_never_partial(tmp_path: Path) -> None:
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
