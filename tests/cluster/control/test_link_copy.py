"""The copy of a node's files alone: what is sent becomes the very bytes of its files, and nothing else is written."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.agent.serve import NodeTail
from cluster.control.link import StrangeAnswerError
from cluster.control.ssh_link import CopyLimits, NodeCopy

LOG = "logs/node1/rank0000.log"
ERROR = "logs/node1/rank0000.error.json"


def copy_of(run: Path, *, lead: bool = True, **limits: float) -> NodeCopy:
    return NodeCopy(run, "node1", lead=lead, limits=CopyLimits(reserve_bytes=0, **limits))


def put(copy: NodeCopy, path: str, offset: int, data: bytes, **facts: object) -> bool:
    return copy.take([{"path": path, "offset": offset, "bytes": len(data), **facts}], data)


def replace(copy: NodeCopy, path: str, data: bytes) -> bool:
    return put(copy, path, 0, data, size=len(data))


def files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())


def test_a_log_goes_on_where_its_copy_ends_and_is_there_from_its_first_byte(run):
    copy = copy_of(run)
    assert put(copy, LOG, 0, b"")
    assert (run / LOG).read_bytes() == b""
    assert copy.take([{"path": LOG, "offset": offset, "bytes": 4} for offset in (0, 4)], b"one\ntwo\n")

    assert copy_of(run).offsets() == {LOG: 8}
    assert (run / LOG).read_bytes() == b"one\ntwo\n"
    modes = [path.stat().st_mode & 0o777 for path in (run / LOG, (run / LOG).parent, run / "logs")]
    assert modes == [0o600, 0o700, 0o700]


@given(
    content=st.binary(min_size=1, max_size=300),
    steps=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 120)), min_size=1, max_size=40),
)
@settings(max_examples=40, deadline=None)
def test_what_does_not_go_on_where_the_copy_ends_is_never_written(tmp_path_factory, content, steps):
    run = tmp_path_factory.mktemp("run")
    copy = copy_of(run)
    for offset, size in steps:
        here = copy.offsets().get(LOG, 0)
        assert put(copy, LOG, offset, content[offset : offset + size]) is (offset == here)
        assert content.startswith((run / LOG).read_bytes())
    here = copy.offsets()[LOG]
    put(copy, LOG, here, content[here:])

    assert (run / LOG).read_bytes() == content
    shutil.rmtree(run)


@pytest.mark.parametrize(
    "path",
    [
        *("../escape.log", "/etc/passwd", "logs/node1/../../escape.log", "logs/node2/rank0000.log", ""),
        *("logs/node1/deep/rank0000.log", "logs/node1/.hidden", "logs/node1/a\nb.log", "logs/node1/\x1b[31m.log"),
        *("logs/node1/" + "x" * 200, "logs//node1/rank0000.log", "logs/node1/rank0000.log/"),
        *("logs/node1/rank0000.log.before-1", "launch.json", "config.yaml", "controller.lock", "checkpoints/latest"),
    ],
)
def test_a_node_may_write_its_own_files_only(run, path):
    copy = copy_of(run)
    assert put(copy, path, 0, b"evil")
    assert replace(copy, path + ".json" if path.endswith("/") else path, b"evil")

    assert files(run) == []
    assert not (run.parent / "escape.log").exists()


def test_traces_come_of_all_nodes_records_of_the_first_alone(run, tmp_path):
    there = tmp_path / "there"
    curve = "tensorboard/events.out.tfevents.17.n1.0"
    of_lead = {"metrics.jsonl": "{}", "events.jsonl": "{}", "summary.json": "{}", "run.json": "{}", curve: "curve"}
    written = {"profile/rank0003.json": "[1]", "profile/x.sh": "no", **of_lead}
    for path, text in written.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text(text)
    for lead in (False, True):
        copy, tail = copy_of(run, lead=lead), NodeTail(str(there), "node1", lead, {})
        heads, data = tail.take(1 << 20)
        is_open = sorted(Path("/proc/self/fd").iterdir())
        assert tail.take(1 << 20) == ([], b"")
        assert sorted(Path("/proc/self/fd").iterdir()) == is_open  # what has not changed is not kept open
        assert ("metrics.jsonl" in {head["path"] for head in heads}) == lead
        assert copy.take(heads, data)
        for path in ("metrics.jsonl", "events.jsonl"):
            put(copy, path, 2 if lead else 0, b"more")  # whatever it says
        replace(copy, "summary.json", b"[]")
        found = {path: (run / path).read_text() for path in files(run) if not path.startswith("nodes/")}
        wanted = {"metrics.jsonl": "{}more", "events.jsonl": "{}more", "summary.json": "[]", curve: "curve"}
        assert found == {"profile/rank0003.json": "[1]", **(wanted if lead else {})}
    assert (run / "nodes" / "node1" / "run.json").read_text() == "{}"


def test_links_and_pipes_are_not_followed_and_hold_up_nothing_else(run, tmp_path):
    secret, elsewhere = tmp_path / "secret", tmp_path / "elsewhere"
    secret.write_text("before")
    (run / "logs" / "node1").mkdir(parents=True)
    (run / LOG).symlink_to(secret)
    os.mkfifo(run / "logs" / "node1" / "pipe.log")
    copy = copy_of(run)
    for path in (LOG, "logs/node1/pipe.log", "logs/node1/good.log"):
        assert put(copy, path, 0, b"text")
    assert secret.read_text() == "before"
    assert (run / "logs" / "node1" / "good.log").read_bytes() == b"text"

    elsewhere.mkdir()
    (elsewhere / "rank0000.log").write_text("of somebody else")
    shutil.rmtree(run / "logs" / "node1")
    (run / "logs" / "node1").symlink_to(elsewhere)
    put(copy, LOG, 0, b"text", anew=True)
    replace(copy, ERROR, b"{}")
    assert copy.offsets() == {}
    assert [path.name for path in elsewhere.iterdir()] == ["rank0000.log"]
    assert copy.problem is None


def test_files_that_change_are_replaced_whole_and_left_out_where_they_are_too_large(run):
    copy, body = copy_of(run), os.urandom(3000)
    replace(copy, ERROR, b'{"error": 1}')
    with (run / ERROR).open() as old:
        assert put(copy, ERROR, 0, body[:2000], size=3000)
        assert (run / ERROR).read_text() == old.read() == '{"error": 1}'
    assert not put(copy, ERROR, 2500, body[2500:], size=3000)  # a gap
    assert put(copy, ERROR, 2000, body[2000:], size=3000)
    assert (run / ERROR).read_bytes() == body
    replace(copy, ERROR, b"")
    assert (run / ERROR).read_bytes() == b""
    assert files(run) == [ERROR]
    with pytest.raises(StrangeAnswerError, match="longer than announced"):
        put(copy, ERROR, 0, b"abc", size=2)
    small = copy_of(run, file_bytes=100)
    for size in (101, 100):
        assert put(small, "logs/node1/large.json", 0, b"x" * 50, size=size)
        assert put(small, "logs/node1/large.json", 50, b"x" * (size - 50), size=size)
        assert (run / "logs/node1/large.json").exists() == (size == 100)


def test_a_log_that_was_begun_anew_on_the_node_keeps_what_was_here(run):
    copy = copy_of(run, replaced_logs=3)
    put(copy, LOG, 0, b"first attempt\n")
    assert put(copy, LOG, 0, b"second\n", anew=True)
    assert (run / LOG).read_bytes() == b"second\n"
    assert (run / f"{LOG}.before-1").read_bytes() == b"first attempt\n"
    assert copy.offsets() == {LOG: 7}
    for number in range(20):  # without end they do not fill the folder
        put(copy, LOG, 0, b"%d" % number, anew=True)
    assert files(run) == sorted([LOG, *(f"{LOG}.before-{n}" for n in (1, 2, 3))])
    assert (run / LOG).read_bytes() == b"19"


def test_the_number_of_files_has_an_end(run):
    copy = copy_of(run, files=5)
    for number in range(8):
        assert put(copy, f"logs/node1/rank{number:04}.log", 0, b"x")
    assert len(files(run)) == 5


@pytest.fixture
def small_disk(testbed_machine: None, tmp_path: Path):
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "burst-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_pauses_the_copy_and_tears_no_gap_into_it(small_disk):
    body = random.Random(1).randbytes(400_000)
    copy = copy_of(small_disk, retry_s=0.0)
    written = [put(copy, LOG, offset, body[offset : offset + 30_000]) for offset in range(0, len(body), 30_000)]
    assert "No space left" in (copy.problem or "")
    assert written == sorted(written, reverse=True)
    assert written.count(True) == (small_disk / LOG).stat().st_size // 30_000
    assert body.startswith((small_disk / LOG).read_bytes())
    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    assert copy.can_go_on()
    here = copy.offsets()[LOG]
    assert put(copy, LOG, here, body[here:])
    assert copy.problem is None
    assert (small_disk / LOG).read_bytes() == body


def test_room_is_kept_for_what_the_launcher_itself_writes(small_disk):
    copy = NodeCopy(small_disk, "node1", lead=True, limits=CopyLimits(reserve_bytes=128 << 10))
    for offset in range(0, 200_000, 10_000):
        put(copy, LOG, offset, b"x" * 10_000)
    assert "kept for the launcher" in (copy.problem or "")
    assert not copy.can_go_on()
    assert (small_disk / LOG).stat().st_size < 140_000
    (small_disk / "run.json").write_bytes(b"x" * 50_000)
