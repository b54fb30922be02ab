"""Lines of logs, read from the end, and followed as they grow: properties, and bounds of memory."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from burst_cli.logs.read import BLOCK_BYTES, Line, LogReader, tail_offset

LINES = st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=30)
MIB = 2**20


def write(folder: Path, content: bytes) -> Path:
    path = folder / "rank0000.log"
    path.write_bytes(content)
    return path


def texts(path: Path, offset: int = 0) -> list[bytes]:
    return [line.text for line in LogReader(path, offset).to_end()]


def new_lines(reader: LogReader) -> list[bytes]:
    return [line.text for line in reader.poll()[0]]


def add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_lines_are_given_once_when_they_are_whole_however_they_arrive(tmp_path_factory, content, cuts) -> None:
    path, found = write(tmp_path_factory.mktemp("cut"), b""), list[bytes]()
    reader = LogReader(path)
    for a, b in itertools.pairwise([0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]):
        add(path, content[a:b])
        found += new_lines(reader)
        assert len(found) == content[:b].count(b"\n")
    found += [line.text for line in reader.flush()]
    wanted = content.split(b"\n")
    assert found == (wanted if wanted[-1] else wanted[:-1])
    assert texts(path) == found


@settings(max_examples=60)
@given(lines=LINES, count=st.integers(0, 40), ended=st.booleans())
def test_tail_is_the_last_lines(tmp_path_factory, lines: list[bytes], count: int, ended: bool) -> None:
    path = write(tmp_path_factory.mktemp("tail"), b"\n".join(lines) + (b"\n" if ended and lines else b""))
    whole = texts(path)
    assert texts(path, tail_offset(path, count)) == (whole[-count:] if count else [])


def test_tail_spans_blocks(
    tmp_path: Path,
) -> None:
    lines = [b"%d " % number + b"x" * 999 for number in range(3 * BLOCK_BYTES // 1000)]
    path = write(tmp_path, b"\n".join(lines) + b"\n")
    for count in (1, 62, 65, 66, 150, len(lines) - 1, len(lines), len(lines) + 1):
        assert texts(path, tail_offset(path, count)) == lines[-count:]
    assert (tail_offset(tmp_path / "no.log", 5), texts(tmp_path / "no.log")) == (0, [])


def test_long_lines_are_truncated(tmp_path: Path) -> None:
    path = write(tmp_path, b"x" * 100_000 + b"\nnext\n")
    assert list(LogReader(path).to_end()) == [Line(b"x" * 2**14, 100_000 - 2**14), Line(b"next")]


def test_reader_begins_anew_when_the_file_is_replaced_or_shrinks(tmp_path: Path) -> None:
    path = write(tmp_path, b"first attempt\nand more of it\n")
    reader = LogReader(path, 6)
    assert new_lines(reader) == [b"attempt", b"and more of it"]
    write(tmp_path, b"short\ntorn")
    assert new_lines(reader) == [b"short"]
    path.rename(tmp_path / "rank0000.log.1")
    assert new_lines(reader) == []
    write(tmp_path, b"a new file, longer than the old one\n")
    assert new_lines(reader) == [b"torn", b"a new file, longer than the old one"]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), most=st.integers(1, 50))
def test_skipped_bytes_of_a_flood_are_counted(tmp_path_factory, sizes: list[int], most: int) -> None:
    path = write(tmp_path_factory.mktemp("sum"), b"")
    reader, shown, skipped = LogReader(path), list[bytes](), 0
    for number, size in enumerate(sizes):
        add(path, b"%d " % number + b"y" * size + b"\n" + b"z" * (size // 2))
        lines, passed = reader.poll(most)
        shown, skipped = [*shown, *(line.text for line in lines)], skipped + passed
    shown += [line.text for line in reader.flush()]
    whole = path.read_bytes().split(b"\n")
    assert set(shown) <= set(whole)
    left = sum(len(line) + 1 for line in shown)
    assert path.stat().st_size <= left + skipped <= path.stat().st_size + 1  # the last line may have no end


def test_line_whose_beginning_was_passed_over_is_not_shown_as_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, b"")
    reader = LogReader(path)
    path.write_bytes(b"x" * 200_000)
    lines, skipped = reader.poll(100_000)  # of which blocks are read
    assert (list(lines), skipped) == ([], 200_000)
    add(path, b"the end of it\nwhole\n")
    lines, skipped = reader.poll(1000)
    assert ([line.text for line in lines], skipped) == ([b"whole"], len(b"the end of it\n"))


def test_memory_of_reading_logs_is_bounded(tmp_path: Path) -> None:
    """64 files of 1 GiB that begin with a line of this size (sparse), lines of 16 MiB at the end of four; a flood."""
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
    flood = tmp_path / "flood.log"
    flood.write_bytes(b"\n" * (MIB // 8))
    tracemalloc.start()
    count = sum(1 for path in paths for _ in LogReader(path, tail_offset(path, 50)).to_end())
    assert (count, tracemalloc.get_traced_memory()[1] < 16 * MIB) == (64 * 50, True)
    tracemalloc.reset_peak()
    assert sum(1 for _ in LogReader(flood).poll()[0]) == MIB // 8
    assert tracemalloc.get_traced_memory()[1] < MIB  # as a list: 8 MiB
    tracemalloc.stop()
