"""The mirror alone: what comes in frames becomes the very bytes of the node's files, and nothing else is written."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.mirror import Mirror, MirrorError, MirrorGapError, MirrorLimits
from cluster.supervise.node.tail import NodeTail, Piece

LOG = "logs/node1/rank0000.log"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def open_mirror(run: Path, *, lead: bool = True, **limits: float) -> Mirror:
    mirror = Mirror(run, "node1", lead=lead, limits=MirrorLimits(reserve_bytes=0, **limits))
    mirror.offsets()
    return mirror


def announce(mirror: Mirror, path: str = LOG, number: int = 0, **facts: object) -> None:
    mirror.announce({"op": "log", "number": number, "path": path, "replace": False, **facts})


def files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())


def own_log(run: Path) -> str:
    return (run / "nodes" / "node1" / "mirror.log").read_text()


def test_a_log_goes_on_where_its_copy_ends(run):
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"one\n")
    mirror.data(0, 4, b"two\n")
    mirror.close()

    assert open_mirror(run).offsets() == {LOG: 8}
    assert (run / LOG).read_bytes() == b"one\ntwo\n"
    assert (run / LOG).stat().st_mode & 0o777 == 0o600
    assert (run / LOG).parent.stat().st_mode & 0o777 == 0o700


def test_bytes_that_came_before_are_not_written_again(run):
    mirror = open_mirror(run)
    announce(mirror)
    for offset, data in ((0, b"abc"), (0, b"abc"), (1, b"bcde"), (0, b"a"), (5, b"f")):
        mirror.data(0, offset, data)

    assert (run / LOG).read_bytes() == b"abcdef"


def test_a_gap_is_never_written(run):
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"abc")

    with pytest.raises(MirrorGapError, match="ends at 3 here, what came begins at 4"):
        mirror.data(0, 4, b"e")
    assert (run / LOG).read_bytes() == b"abc"


def test_somebody_else_who_writes_is_noticed(run):
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"abc")
    with (run / LOG).open("r+") as file:
        file.truncate(1)

    with pytest.raises(MirrorGapError):
        mirror.data(0, 3, b"def")


@given(
    content=st.binary(min_size=1, max_size=300),
    steps=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 120), st.booleans()), min_size=1, max_size=40),
)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_twice_overlaps_or_lacks_the_copy_is_always_the_beginning_of_the_log(
    tmp_path_factory, content, steps
):
    run = tmp_path_factory.mktemp("run")
    mirror = open_mirror(run)
    announce(mirror)
    for offset, size, is_killed in steps:
        if is_killed:  # nothing but the file is left of a killed launcher
            mirror.close()
            mirror = open_mirror(run)
            announce(mirror)
        try:
            mirror.data(0, offset, content[offset : offset + size])
        except MirrorGapError:
            continue
        assert content.startswith((run / LOG).read_bytes() if (run / LOG).exists() else b"")
    here = mirror.offsets().get(LOG, 0)
    announce(mirror)
    mirror.data(0, here, content[here:])
    mirror.close()

    assert (run / LOG).read_bytes() == content
    shutil.rmtree(run)


@pytest.mark.parametrize(
    "path",
    [
        "../escape.log",
        "/etc/passwd",
        "logs/node1/../../escape.log",
        "logs/node2/rank0000.log",
        "logs/node1/deep/rank0000.log",
        "logs/node1/.hidden",
        "logs/node1/a\nb.log",
        "logs/node1/\x1b[31m.log",
        "logs/node1/" + "x" * 200,
        "logs//node1/rank0000.log",
        "logs/node1/rank0000.log/",
        "nodes/node1/mirror.log",
        "logs/node1/rank0000.log.before-1",
        "launch.json",
        "config.yaml",
        "controller.lock",
        "checkpoints/latest",
        "",
    ],
)
def test_a_node_may_write_its_own_files_only(run, path):
    mirror = open_mirror(run)
    announce(mirror, path)
    mirror.data(0, 0, b"evil")
    mirror.replace(path + ".json" if path.endswith("/") else path, "evil")
    mirror.close()

    assert files(run) == ["nodes/node1/mirror.log"]
    assert not (run.parent / "escape.log").exists()
    assert "\x1b" not in own_log(run)
    assert "refused" in own_log(run)


def test_only_the_first_node_writes_figures_of_the_run(run):
    for lead in (False, True):
        mirror = open_mirror(run, lead=lead)
        for number, path in enumerate(("metrics.jsonl", "events.jsonl")):
            announce(mirror, path, number)
            mirror.data(number, 0, b"{}\n")
        mirror.replace("summary.json", "{}")
        mirror.replace("run.json", "{}")
        mirror.close()
        assert (run / "metrics.jsonl").exists() == (run / "summary.json").exists() == lead
    assert (run / "nodes" / "node1" / "run.json").read_text() == "{}"
    assert not (run / "run.json").exists()


def test_traces_of_all_nodes_and_curves_of_the_first_come_back(run, tmp_path):
    there = tmp_path / "there"
    written = {"profile/rank0003.json": "[1]", "tensorboard/events.out.tfevents.17.n1.0": "curve", "profile/x.sh": "no"}
    for path, text in written.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text(text)
    for lead in (False, True):
        mirror = open_mirror(run, lead=lead)
        for item in NodeTail(str(there), "node1", lead, {}).round():
            if isinstance(item, Piece):
                announce(mirror, item.path, item.number)
                mirror.data(item.number, item.offset, item.data)
            else:
                mirror.replace(item.path, item.data.decode())
        mirror.close()
        expected = {path: written[path] for path in sorted(written)[: 1 + 2 * lead] if path != "profile/x.sh"}
        found = {path: (run / path).read_text() for path in written if (run / path).exists()}
        assert found == expected


def test_links_are_not_followed_and_hold_up_nothing_else(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("before")
    (run / "logs" / "node1").mkdir(parents=True)
    (run / LOG).symlink_to(secret)
    os.mkfifo(run / "logs" / "node1" / "pipe.log")
    mirror = open_mirror(run)
    for number, path in enumerate((LOG, "logs/node1/pipe.log", "logs/node1/good.log")):
        announce(mirror, path, number)
        mirror.data(number, 0, b"text")

    assert secret.read_text() == "before"
    assert (run / "logs" / "node1" / "good.log").read_bytes() == b"text"
    assert mirror.problem is None
    assert mirror.has_all({LOG: 4, "logs/node1/good.log": 4})
    assert own_log(run).count("cannot be mirrored") == 2


def test_a_folder_that_is_a_link_is_not_entered(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "logs").mkdir()
    (run / "logs" / "node1").symlink_to(elsewhere)
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"text")
    mirror.replace("logs/node1/rank0000.error.json", "{}")

    assert list(elsewhere.iterdir()) == []


def test_files_that_change_are_replaced_whole(run):
    mirror = open_mirror(run)
    path = "logs/node1/rank0000.error.json"
    mirror.replace(path, '{"error": 1}')
    with (run / path).open() as old:
        mirror.replace(path, '{"error": 2}')
        assert old.read() == '{"error": 1}'

    assert (run / path).read_text() == '{"error": 2}'
    assert files(run) == [path, "nodes/node1/mirror.log"]


def test_a_large_file_is_replaced_when_all_of_it_has_come(run):
    mirror = open_mirror(run)
    path, body = "logs/node1/rank0000.flight.json", os.urandom(3000)
    mirror.replace(path, "old")
    announce(mirror, path, 3, replace=True, size=3000)
    mirror.data(3, 0, body[:2000])
    assert (run / path).read_bytes() == b"old"
    mirror.data(3, 2000, body[2000:])
    assert (run / path).read_bytes() == body
    announce(mirror, path, 4, replace=True, size=2)  # and a second time
    mirror.data(4, 0, b"ab")

    assert (run / path).read_bytes() == b"ab"
    announce(mirror, path, 5, replace=True, size=2)
    with pytest.raises(MirrorError, match="longer than announced"):
        mirror.data(5, 0, b"abc")


def test_a_file_larger_than_allowed_is_left_out_and_noted(run):
    mirror = open_mirror(run, file_bytes=100)
    announce(mirror, "logs/node1/rank0000.flight.json", 0, replace=True, size=101)
    mirror.data(0, 0, b"x" * 101)

    assert files(run) == ["nodes/node1/mirror.log"]
    assert "too large" in own_log(run)


def test_a_log_that_was_begun_anew_on_the_node_keeps_what_was_here(run):
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"first attempt\n")
    announce(mirror, LOG, 1, replace=True)
    mirror.data(1, 0, b"second\n")

    assert (run / LOG).read_bytes() == b"second\n"
    assert (run / f"{LOG}.before-1").read_bytes() == b"first attempt\n"
    assert f"{LOG}.before-1" in own_log(run)
    assert mirror.offsets() == {LOG: 7}


def test_a_log_that_is_shorter_at_the_end_is_asked_for_again(run):
    mirror = open_mirror(run)
    announce(mirror)
    mirror.data(0, 0, b"long text\n")

    with pytest.raises(MirrorGapError):
        mirror.has_all({LOG: 4})
    assert (run / f"{LOG}.before-1").read_bytes() == b"long text\n"
    assert mirror.offsets() == {}


def test_an_empty_log_is_there_too_at_the_end(run):
    mirror = open_mirror(run)
    assert mirror.has_all({LOG: 0})
    assert (run / LOG).read_bytes() == b""


def test_logs_begun_anew_without_end_do_not_fill_the_folder(run):
    mirror = open_mirror(run, replaced_logs=3)
    for number in range(20):
        announce(mirror, LOG, number, replace=True)
        mirror.data(number, 0, b"%d" % number)

    assert files(run) == sorted([LOG, *(f"{LOG}.before-{n}" for n in (1, 2, 3)), "nodes/node1/mirror.log"])
    assert (run / LOG).read_bytes() == b"19"


def test_the_number_of_files_has_an_end_and_so_has_our_own_log(run):
    mirror = open_mirror(run, files=5, own_log_bytes=1000, open_files=2)
    for number in range(2000):
        announce(mirror, f"logs/node1/rank{number:04}.log", number)
        mirror.data(number, 0, b"x")

    assert len(files(run)) == 6
    assert len(own_log(run)) < 1500
    assert len(list(Path("/proc/self/fd").iterdir())) < 100


def test_what_makes_no_sense_is_refused(run):
    mirror = open_mirror(run)
    for message in ({}, {"number": -1, "path": LOG}, {"number": "0", "path": LOG}, {"number": 0, "path": 7}):
        with pytest.raises(MirrorError):
            mirror.announce(message)
    with pytest.raises(MirrorError, match="never announced"):
        mirror.data(7, 0, b"x")
    with pytest.raises(MirrorError):
        mirror.replace(None, "x")
    with pytest.raises(MirrorError):
        mirror.has_all({LOG: "4"})
    mirror.replace("logs/node1/rank0000.error.json", "half a character: \ud800")
    (run / "logs" / "node1" / "rank0000.error.json").read_text(encoding="utf-8")


def test_two_processes_never_mirror_the_same_node(run):
    first, second = open_mirror(run), open_mirror(run, retry_s=0.0)
    announce(second)
    second.data(0, 0, b"doubled")

    assert first.problem is None
    assert "another process" in (second.problem or "")
    assert not (run / LOG).exists()
    first.close()
    with pytest.raises(MirrorGapError):
        second.retry()
    assert second.problem is None


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
    mirror = open_mirror(small_disk, retry_s=0.0)
    announce(mirror)
    for offset in range(0, len(body), 30_000):
        mirror.data(0, offset, body[offset : offset + 30_000])
    assert "No space left" in (mirror.problem or "")
    assert body.startswith((small_disk / LOG).read_bytes())
    assert not mirror.has_all({LOG: len(body)})
    mirror.retry()
    assert mirror.problem is not None  # still full

    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    with pytest.raises(MirrorGapError):
        mirror.data(0, 390_000, body[390_000:])
    here = mirror.offsets()[LOG]
    announce(mirror, LOG, 1)
    mirror.data(1, here, body[here:])

    assert mirror.problem is None
    assert (small_disk / LOG).read_bytes() == body
    assert mirror.has_all({LOG: len(body)})


def test_room_is_kept_for_what_the_launcher_itself_writes(small_disk):
    mirror = Mirror(small_disk, "node1", lead=True, limits=MirrorLimits(reserve_bytes=128 << 10, look_bytes=8 << 10))
    mirror.offsets()
    announce(mirror)
    for offset in range(0, 200_000, 10_000):
        mirror.data(0, offset, b"x" * 10_000)

    assert "kept for the launcher" in (mirror.problem or "")
    assert (small_disk / LOG).stat().st_size < 140_000
    (small_disk / "run.json").write_bytes(b"x" * 50_000)
