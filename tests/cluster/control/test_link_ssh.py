"""Links over a wire that breaks, against the agent of the nodes itself; and against agents that lie."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
import tracemalloc
from pathlib import Path
from time import time_ns as now_ns

import pytest
from agent_rig import LOG, NODE, RUN_ID, FakeNode, Stream, begin, closing, spec_of, status, swept, wait_for_ends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.agent.messages import pack
from cluster.control.link import NodeStatus, StartRefusedError
from cluster.control.ssh_link import LinkTiming
from cluster.errors import SshError, SshFailure

MIB = 1 << 20


def content(path: Path) -> bytes:
    """Of a file that may be moved aside at any moment."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


# --- following -------------------------------------------------------------------------------------------------------


def test_a_followed_node_is_copied_to_its_end(run, node):
    node.run_on()
    node.append(LOG, b"one\n")
    node.append("metrics.jsonl", b'{"step": 1}\n')
    link = node.link(run)
    with closing(link):
        assert link.poll().problem == "not connected yet"
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        node.append(LOG, b"two\n")
        node.write("health.json", {"at": "now", "load1": 0.5})
        wait_for(lambda: link.poll().health)
        assert not link.poll().is_synced
        node.end()
        wait_for(lambda: link.poll().is_synced)
        seen = link.poll()

    assert (seen.phase, seen.outcome["cause"], seen.problem) == ("ended", "exit", None)
    assert (run / LOG).read_bytes() == b"one\ntwo\n"
    assert (run / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    assert json.loads((run / "nodes" / NODE / "outcome.json").read_text())["cause"] == "exit"


def test_a_log_of_any_size_passes_in_bounded_memory_before_its_node_counts_as_synced(run, node):
    node.run_on()
    node.end()
    with (node.folder / LOG).open("wb") as file:
        file.truncate(24 * MIB)
    link = node.link(run)
    tracemalloc.start()
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().is_synced)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (run / LOG).stat().st_size == 24 * MIB
    assert peak < 6 * MIB  # of both ends: the code of the agent, and some copies of what one answer carries


def test_requests_reach_the_supervisor_as_files_and_are_made_again_where_they_could_not(run, node):
    node.run_on()
    state_dir = node.folder / "nodes" / NODE
    (state_dir / "stop.json").mkdir()
    (state_dir / "stop.json" / "in the way").touch()
    link = node.link(run)
    with closing(link):
        link.stop("Ctrl-C", 12.0)  # before there is any connection
        assert "stop.json" in wait_for(lambda: (link.poll().problem or "").partition("the node says: stop")[2])
        (state_dir / "stop.json" / "in the way").unlink()
        (state_dir / "stop.json").rmdir()
        assert wait_for(lambda: node.read("stop.json"))["grace_s"] == 12.0
        wait_for(lambda: link.poll().problem is None)
        link.stop("Ctrl-C", 0.0)
        wait_for(lambda: node.read("stop.json")["grace_s"] == 0.0)
        link.request_stacks("nonce1")
        assert wait_for(lambda: node.read("stacks.json")) == {"nonce": "nonce1"}
        link.beat()
        wait_for((state_dir / "lease").exists)
        os.utime(state_dir / "lease", (1.0, 1.0))
        link.beat()
        wait_for(lambda: (state_dir / "lease").stat().st_mtime > 1.0)
        assert swept(link) == ()


def test_what_the_node_has_answered_is_not_asked_for_again_what_it_has_not_is(run, node):
    taken: list[set[str]] = []

    def noting(stream: Stream) -> None:
        names: set[str] = set()
        taken.append(names)
        while (question := stream.next()) is not None:
            names.update(question)
            if len(taken) == 1 and "stop" in question:
                return  # it was heard, but no answer came
            stream.say(status=status())

    node.wire.script = noting
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        link.stop("Ctrl-C", 5.0)
        wait_for(lambda: len(taken) == 2 and "stop" in taken[1])
        wait_for(lambda: link.poll().problem is None)
        node.wire.cut()
        wait_for(lambda: len(taken) == 3 and "follow" in taken[2])
        link.beat()
        wait_for(lambda: "beat" in taken[2])

    assert "stop" not in taken[2]


def test_the_clock_of_the_node_is_told_by_the_fastest_answer_however_long_it_waits_for_news(run, node):
    ahead_ns = 5_000_000_000
    answered: list[int] = []

    def script(stream: Stream) -> None:
        # The slow ones are late on the way back only, so they mislead by half of that; one waits there for news.
        for way_s, waits_s in ((0.2, 0.0), (0.0, 0.3), *[(0.0, 0.0)] * 8, (0.2, 0.0)):
            stream.next()
            got_ns = now_ns() + ahead_ns
            time.sleep(waits_s)
            answer = {"got_ns": got_ns, "now_ns": now_ns() + ahead_ns, "status": status()}
            time.sleep(way_s)
            stream.write(pack(answer))
            answered.append(1)
        stream.next()  # it has heeded the last one
        answered.append(1)
        stream.wait_for_end()

    node.wire.script = script
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: len(answered) == 12)
        offset_ns = link.poll().clock_offset_ns

    assert abs(offset_ns - ahead_ns) < 80_000_000


def test_no_call_waits_for_a_node_that_says_nothing(run, node):
    node.wire.script = lambda stream: time.sleep(30)
    link = node.link(run, LinkTiming(silence_s=30.0))
    since = machine_time()
    link.follow()
    for _ in range(100):
        link.poll(), link.beat(), link.stop("x", 1.0), link.request_stacks("n"), link.sweep()
    elapsed = machine_time() - since
    assert link.poll().heard_s > 0
    assert link.poll().swept is None
    link.close()

    assert elapsed < 0.5
    wait_for_ends(20.0)


# --- reconnecting ----------------------------------------------------------------------------------------------------


def test_every_way_to_fail_is_a_problem_in_words_and_none_is_the_end(run, node):
    kinds = [SshFailure.REFUSED, SshFailure.HOST_KEY_CHANGED, SshFailure.AUTH, SshFailure.LOST]
    node.wire.scripts.append(lambda stream: stream.wait_for_end())
    node.wire.scripts.append(lambda stream: stream.write(pack({"got_ns": 1})[:11]))
    node.wire.scripts.append(lambda stream: stream.write(b"Welcome to node1!\n" * 100))
    node.wire.scripts.append(lambda stream: None)
    node.run_on()
    told: list[NodeStatus] = []  # as it was before each connection

    def note() -> None:
        told.append(link.poll())
        if len(told) == 2:
            node.wire.refusals.extend(SshError(NODE, kind, f"text of {kind}", "do this") for kind in kinds)

    node.wire.on_connect = note
    link = node.link(run, LinkTiming(first_pause_s=0.01, longest_pause_s=0.05, silence_s=1.0))
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running" and link.poll().problem is None)
        wait_for(lambda: link.poll().heard_s < 0.4)

    assert [status.problem for status in told[:2]] == ["not connected yet", "nothing was heard for 1 s"]
    assert told[1].heard_s >= 1.0
    words = " | ".join(str(status.problem) for status in told[2:])
    for part in (*kinds, "do this", "the stream ended within a message", "not a message", "python3 there ended with 1"):
        assert part in words
    assert "\x1b" not in words


def test_a_node_without_python_says_so(run, node):
    node.wire.script = lambda stream: None
    node.wire.fell = {"exit_code": 127, "stderr": b"sh: python3: not found"}
    link = node.link(run)
    with closing(link):
        with pytest.raises(StartRefusedError, match=r"there is no python3; burst needs Python 3\.9") as caught:
            begin(link, spec_of(node))
        assert caught.value.kind == "command"


@given(
    cuts=st.lists(st.integers(0, 9000), max_size=8),
    kills=st.lists(st.integers(0, 100), max_size=3),
    size=st.integers(1, 20_000),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_wherever_the_line_is_cut_and_whenever_the_launcher_dies_the_copy_is_the_same(
    tmp_path_factory, cuts, kills, size
):
    base = tmp_path_factory.mktemp("cuts")
    node, run, body = FakeNode(base / "there"), base / "here" / RUN_ID, random.Random(size).randbytes(size)
    run.mkdir(parents=True)
    node.run_on()
    node.wire.cuts.extend(cuts)

    def write() -> None:
        step = size // 30 + 1
        for at in range(0, size, step):
            node.append(LOG, body[at : at + step])
            time.sleep(0.01)
        node.end()

    writer = threading.Thread(target=write)
    writer.start()
    for kill in kills:
        with closing(link := node.link(run)):
            link.follow()
            time.sleep(kill / 300)
    with closing(link := node.link(run)):
        link.follow()
        wait_for(lambda: link.poll().is_synced)
    writer.join()

    assert (run / LOG).read_bytes() == body
    assert not list(run.rglob("*.before-*"))


def test_a_copy_that_somebody_changed_goes_on_where_it_ends_a_log_begun_anew_is_kept_apart_across_a_reconnect(
    run, node
):
    node.run_on()
    node.append(LOG, b"one\n")
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: content(run / LOG) == b"one\n")
        (run / LOG).write_bytes(b"on")
        node.append(LOG, b"two\n")
        wait_for(lambda: content(run / LOG) == b"one\ntwo\n")
        assert node.wire.connects == 1
        node.wire.cut()
        (node.folder / LOG).write_bytes(b"second\n")
        wait_for(lambda: content(run / LOG) == b"second\n")

    assert (run / f"{LOG}.before-1").read_bytes() == b"one\ntwo\n"


# --- agents that lie -------------------------------------------------------------------------------------------------


def nested(depth: int) -> list[object]:
    return [nested(depth - 1)] if depth else []


PIECES = [
    *({"path": "../../evil.log"}, {"path": "/tmp/../evil.json", "size": 1}, {"path": 5}, {"offset": -1}),
    *({"bytes": None}, {"bytes": 2}, {"offset": 1 << 40}, {"path": f"logs/{NODE}/rank0000.error.json", "size": 0}),
]
ANSWERS = [
    *({"files": {"path": LOG}}, {"files": [LOG]}, {"status": {"phase": "evil"}}, {"status": 5}),
    *({"status": status(outcome=5)}, {"status": status(health={"deep": nested(100)})}),
    *({"status": status(health={"many": [0] * 100_000})}, {"got_ns": 1 << 70, "now_ns": "soon"}),
    *({"swept": {"1": 1}, "all": "much"}, {"errors": {"stop": ["\x1b[31m"]}}, {"errors": "all"}),
]
EVIL = [
    *(pack({"files": [{"path": LOG, "offset": 0, "bytes": 1, **head}]}, b"x") for head in PIECES),
    *(pack(answer) for answer in ANSWERS),
    *(pack({}, b"nobody's"), b"\x00\x00\x00\x02\x00\x00\x00\x00[]", b"\x00\x00\x00\x05\x00\x00\x00\x00hello"),
    *(b"\x7f\xff\xff\xff" * 2, b"\x00" * 5000),
]


def test_nothing_that_an_agent_says_breaks_the_link_or_leaves_the_run_folder(run, node, tmp_path):
    for words in EVIL:
        node.wire.scripts.append(lambda stream, words=words: (stream.write(words), stream.wait_for_end()))
    node.run_on()
    node.append(LOG, b"true text\n")
    link = node.link(run, LinkTiming(first_pause_s=0.01, longest_pause_s=0.02, silence_s=0.3))
    with closing(link):
        link.follow()
        wait_for(lambda: not node.wire.scripts)
        wait_for(lambda: link.poll().phase == "running")
        node.end()
        wait_for(lambda: link.poll().is_synced)

    assert (run / LOG).read_bytes() == b"true text\n"
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there"}
    assert {path.name for path in run.iterdir()} == {"logs", "nodes"}


def test_words_of_a_node_are_harmless_by_the_time_they_are_seen(run, node):
    outcome = {"cause": "exit\x1b[2J", "error": "x" * 200_000, "ended_ns": float("nan"), "\x07key": ["\u202e"]}
    node.wire.script = lambda stream: (stream.next(), stream.say(status=status("ended", outcome=outcome)))
    link = node.link(run)
    with closing(link):
        link.follow()
        seen = wait_for(lambda: link.poll().outcome)

    assert seen["cause"] == "exit"
    assert len(seen["error"]) < 70_000
    assert seen["ended_ns"] is None
    assert seen["key"] == [""]
