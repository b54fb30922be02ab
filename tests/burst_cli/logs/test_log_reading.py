"""Lines of logs, read from the end, and followed as they grow: properties, and bounds of memory."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from burst_cli.logs.read import (
    BLOCK_BYTES,
    KEEP_BYTES,
    Line,
    LineCutter,
    LogFollower,
    complete_end,
    read_lines,
    tail_offset,
)

AMPLE = 2**30
LINES = st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=30)
MIB = 2**20


def write(folder: Path, content: bytes, name: str = "rank0000.log") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def texts(path: Path, offset: int = 0) -> list[bytes]:
    return [line.text for line in read_lines(path, offset)]


# --- cutting and reading from the end ---------------------------------------------------------------------------------


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_lines_do_not_depend_on_how_bytes_arrive(content: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    cutter = LineCutter()
    found = [line for a, b in itertools.pairwise(edges) for line in cutter.feed(content[a:b])]
    found += cutter.flush()
    wanted = content.split(b"\n")
    assert [line.text for line in found] == (wanted if wanted[-1] else wanted[:-1])


@settings(max_examples=60)
@given(lines=LINES, count=st.integers(0, 40), ended=st.booleans())
def test_tail_is_the_last_lines(tmp_path_factory, lines: list[bytes], count: int, ended: bool) -> None:
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    path = write(tmp_path_factory.mktemp("tail"), content)
    whole = texts(path)
    assert texts(path, tail_offset(path, count)) == (whole[-count:] if count else [])


def test_tail_spans_blocks(tmp_path: Path) -> None:
    lines = [b"%d " % number + b"x" * 999 for number in range(3 * BLOCK_BYTES // 1000)]
    path = write(tmp_path, b"\n".join(lines) + b"\n")
    for count in (1, 250, 263, 300, len(lines) - 1, len(lines), len(lines) + 1):
        assert texts(path, tail_offset(path, count)) == lines[-count:]


def test_tail_of_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert tail_offset(tmp_path / "no.log", 5) == 0
    assert texts(tmp_path / "no.log") == []
    assert complete_end(tmp_path / "no.log") == 0


def test_long_line_is_kept_in_part_and_the_rest_counted(tmp_path: Path) -> None:
    path = write(tmp_path, b"x" * (KEEP_BYTES + 1000) + b"\nnext\n")
    assert list(read_lines(path)) == [Line(b"x" * KEEP_BYTES, 1000), Line(b"next")]


# --- following --------------------------------------------------------------------------------------------------------


def new_lines(follower: LogFollower) -> list[bytes]:
    return [line.text for line in follower.poll(AMPLE)[0]]


def test_follower_gives_each_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, b"old\none\ntw")
    follower = LogFollower(path, 4)
    assert new_lines(follower) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert new_lines(follower) == [b"two"]
    assert new_lines(follower) == []
    with path.open("ab") as file:
        file.write(b"torn")
    assert new_lines(follower) == []
    assert [line.text for line in follower.flush()] == [b"torn"]


def test_follower_begins_anew_when_the_file_is_replaced_or_shrinks(tmp_path: Path) -> None:
    path = write(tmp_path, b"first attempt\nand more of it\n")
    follower = LogFollower(path)
    new_lines(follower)
    write(tmp_path, b"short\n")
    assert new_lines(follower) == [b"short"]
    path.rename(tmp_path / "rank0000.log.1")
    assert new_lines(follower) == []
    write(tmp_path, b"a new file\n")
    assert new_lines(follower) == [b"a new file"]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), most=st.integers(1, 50))
def test_of_a_flood_the_last_whole_lines_are_shown_and_the_bytes_before_them_counted(
    tmp_path_factory, sizes: list[int], most: int
) -> None:
    path = write(tmp_path_factory.mktemp("sum"), b"")
    follower, shown, skipped = LogFollower(path), list[bytes](), 0
    for number, size in enumerate(sizes):
        with path.open("ab") as file:
            file.write(b"%d " % number + b"y" * size + b"\n" + b"z" * (size // 2))
        lines, passed = follower.poll(most)
        shown, skipped = [*shown, *(line.text for line in lines)], skipped + passed
    shown += [line.text for line in follower.flush()]
    whole = path.read_bytes().split(b"\n")
    assert set(shown) <= set(whole)
    left = sum(len(line) + 1 for line in shown)
    assert path.stat().st_size <= left + skipped <= path.stat().st_size + 1  # the last line may have no end


def test_line_whose_beginning_was_passed_over_is_not_shown_as_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, b"")
    follower = LogFollower(path)
    path.write_bytes(b"x" * 100_000)
    lines, skipped = follower.poll(1000)
    assert (list(lines), skipped) == ([], 100_000)
    with path.open("ab") as file:
        file.write(b"the end of it\nwhole\n")
    lines, skipped = follower.poll(1000)
    assert ([line.text for line in lines], skipped) == ([b"whole"], len(b"the end of it\n"))


def test_memory_is_bounded_whatever_the_size_of_files_and_lines(tmp_path: Path) -> None:
    """64 files of 1 GiB that begin with a line of this size (sparse), and lines of 16 MiB at the end of four."""
    paths = []
    for rank in range(64):
        path = tmp_path / f"rank{rank:04d}.log"
        with path.open("wb") as file:
            os.ftruncate(file.fileno(), 1024 * MIB)
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + b"a line of this rank\n" * 500)
            if rank < 4:
                file.seek(16 * MIB, os.SEEK_CUR)
                file.write(b"\nlast\n")
        paths.append(path)
    tracemalloc.start()
    count = sum(1 for path in paths for _ in read_lines(path, tail_offset(path, 50)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 64 * 50
    assert peak < 16 * MIB


def test_a_flood_of_short_lines_needs_little_more_than_its_bytes(tmp_path: Path) -> None:
    follower = LogFollower(write(tmp_path, b"\n" * (MIB // 8)))
    tracemalloc.start()
    count = sum(1 for _ in follower.poll(AMPLE)[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == MIB // 8
    assert peak < MIB  # as a list: 8 MiB
