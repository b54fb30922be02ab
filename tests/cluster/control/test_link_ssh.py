"""Links over a wire that breaks, against the bridge of the nodes itself; and against bridges that do not keep to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import time_ns as now_ns

import pytest
from bridge_rig import NODE, RUN_ID, FakeConnection, FakeNode, Stream, closing, hello, spec_of, status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.access.connection import CommandResult
from cluster.access.hosts import Host
from cluster.control.link import NodeStatus, StartRefusedError
from cluster.control.ssh_link import LinkTiming, NodePlace
from cluster.errors import SshError, SshFailure
from cluster.supervise.node.frames import pack_data, pack_message

LOG = f"logs/{NODE}/rank0000.log"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / RUN_ID
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path / "there" / RUN_ID)


def note_before_connecting(node: FakeNode, note: Callable[[], object]) -> None:
    """Call `note` whenever a link is about to connect: what came of the connection before is known by then."""
    connect = node.wire.connect

    def noting(host: Host) -> FakeConnection:
        note()
        return connect(host)

    node.wire.connect = noting


def content(path: Path) -> bytes:
    """Of a file that may be moved aside at any moment."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


# --- following -------------------------------------------------------------------------------------------------------


def test_a_followed_node_is_mirrored_to_its_end(run, node):
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


def test_requests_reach_the_supervisor_as_files(run, node):
    node.run_on()
    link = node.link(run)
    with closing(link):
        link.stop("Ctrl-C", 12.0)  # before there is any connection
        link.follow()
        link.beat()
        assert wait_for(lambda: node.read("stop.json"))["grace_s"] == 12.0
        link.stop("Ctrl-C", 0.0)
        wait_for(lambda: node.read("stop.json")["grace_s"] == 0.0)
        link.request_stacks("nonce1")
        assert wait_for(lambda: node.read("stacks.json")) == {"nonce": "nonce1"}
        link.beat()
        wait_for(lambda: (node.folder / "nodes" / NODE / "lease").exists())
        assert link.sweep(20.0) == ()


def test_what_the_node_has_confirmed_is_not_asked_for_again_what_it_has_not_is(run, node):
    taken: list[list[str]] = []

    def noting(answers_beats: bool):
        def script(stream: Stream) -> None:
            ops: list[str] = []
            taken.append(ops)
            stream.write(hello())
            while (frame := stream.reader.next()) is not None:
                ops.append(frame.message["op"])
                if frame.message["op"] == "follow":
                    stream.write(status())
                if frame.message["op"] == "beat" and answers_beats:
                    stream.write(pack_message({"op": "beat", "id": frame.message["id"], "now_ns": now_ns()}))

        return script

    node.wire.scripts.extend([noting(False), noting(True)])
    node.wire.script = noting(True)
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        link.stop("Ctrl-C", 5.0)
        link.beat()
        wait_for(lambda: taken[0][-1:] == ["beat"])
        node.wire.cut()
        wait_for(lambda: len(taken) == 2 and "stop" in taken[1])  # again, for no answer came
        link.beat()
        wait_for(lambda: link.poll().clock_offset_ns)
        node.wire.cut()
        wait_for(lambda: len(taken) == 3 and "follow" in taken[2])
        link.beat()
        wait_for(lambda: "beat" in taken[2])

    assert "stop" not in taken[2]


def test_the_clock_of_the_node_is_told_by_the_fastest_beat(run, node):
    ahead_ns = 5_000_000_000
    answered: list[int] = []

    def script(stream: Stream) -> None:
        stream.write(hello())
        stream.take("follow")
        stream.write(status())
        # The slow ones are late on the way back only, so they mislead by half of that.
        for way_s in (0.2, 0.0, 0.0, 0.0, 0.2):
            beat = stream.take("beat")
            answer = {"op": "beat", "id": beat["id"], "now_ns": now_ns() + ahead_ns}
            time.sleep(way_s)
            stream.write(pack_message(answer))
            answered.append(1)
        stream.wait_for_end()

    node.wire.script = script
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        for number in range(1, 6):
            link.beat()
            wait_for(lambda number=number: len(answered) == number)
        offset_ns = wait_for(lambda: link.poll().clock_offset_ns)

    assert abs(offset_ns - ahead_ns) < 80_000_000


def test_no_call_waits_for_a_node_that_says_nothing(run, node):
    node.wire.script = lambda stream: time.sleep(30)
    link = node.link(run, LinkTiming(silence_s=30.0))
    begin = machine_time()
    link.follow()
    for _ in range(100):
        link.poll(), link.beat(), link.stop("x", 1.0), link.request_stacks("n")
    elapsed = machine_time() - begin
    assert link.poll().heard_s > 0
    with pytest.raises(SshError, match=r"was not seen clearing up within 0\.1 s"):
        link.sweep(0.1)
    link.close()

    assert elapsed < 0.5
    assert link.join(5.0)


def test_a_silent_node_is_reconnected_to_and_how_long_it_was_silent_is_told(run, node):
    node.wire.scripts.append(lambda stream: (stream.write(hello()), stream.wait_for_end()))
    node.run_on()
    link = node.link(run, LinkTiming(first_pause_s=0.4, silence_s=0.5))
    told: list[NodeStatus] = []  # as it was before each connection
    note_before_connecting(node, lambda: told.append(link.poll()))
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        assert told[0].problem == "not connected yet"
        assert told[1].problem == "nothing was heard for 0.5 s"
        assert told[1].heard_s >= 0.5

    assert link.poll().heard_s < 3


def test_every_way_to_fail_is_a_problem_in_words_and_none_is_the_end(run, node):
    kinds = [SshFailure.REFUSED, SshFailure.HOST_KEY_CHANGED, SshFailure.AUTH, SshFailure.LOST]
    node.wire.refusals.extend(SshError(NODE, kind, f"text of {kind}", "do this") for kind in kinds)
    node.wire.scripts.append(lambda stream: stream.write(hello()[:7]))
    node.wire.scripts.append(lambda stream: stream.write(b"Welcome to node1!\n" * 100))
    node.wire.scripts.append(lambda stream: None)
    node.run_on()
    link, problems = node.link(run), set()
    note_before_connecting(node, lambda: problems.add(link.poll().problem))
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
        wait_for(lambda: link.poll().problem is None)

    told = " | ".join(str(problem) for problem in problems)
    for part in (*kinds, "do this", "the stream ended within a frame", "not a frame", "the bridge there ended with 1"):
        assert part in told
    assert "\x1b" not in told


def test_a_node_without_python_says_so(run, node):
    node.wire.script = lambda stream: None
    node.wire.result = CommandResult(127, b"", b"sh: python3: not found", 0.0)
    link = node.link(run)
    with closing(link):
        with pytest.raises(StartRefusedError, match=r"there is no python3; burst needs Python 3\.9") as caught:
            link.start(spec_of(node))
        assert caught.value.kind == "command"


# --- reconnecting ----------------------------------------------------------------------------------------------------


def written_in_pieces(node: FakeNode, body: bytes, pieces: int) -> threading.Thread:
    def write() -> None:
        size = len(body) // pieces + 1
        for at in range(0, len(body), size):
            node.append(LOG, body[at : at + size])
            time.sleep(0.01)
        node.end()

    thread = threading.Thread(target=write)
    thread.start()
    return thread


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
    node, run = FakeNode(base / "there"), base / "here" / RUN_ID
    run.mkdir(parents=True)
    node.run_on()
    node.wire.cuts.extend(cuts)
    body = random.Random(size).randbytes(size)
    writer = written_in_pieces(node, body, 30)
    links = []
    for kill in [*kills, None]:
        link = node.link(run)
        links.append(link)
        link.follow()
        if kill is not None:
            time.sleep(kill / 300)
            link.close()
            link.join(5.0)
    with closing(*links):
        wait_for(lambda: links[-1].poll().is_synced)
    writer.join()

    assert (run / LOG).read_bytes() == body
    assert not list(run.rglob("*.before-*"))


@pytest.mark.parametrize("seed", [1, 2])
def test_launchers_killed_at_random_moments_lose_and_double_nothing(run, node, seed):
    node.run_on()
    body = random.Random(seed).randbytes(3_000_000)
    command = [sys.executable, str(Path(__file__).with_name("killed_mirrors.py")), str(run), str(node.folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killing = subprocess.Popen([*command, "15", str(seed)], env=environment)
    try:
        for at in range(0, len(body), 20_000):
            node.append(LOG, body[at : at + 20_000])
            time.sleep(0.01)
    finally:
        assert killing.wait(200) == 0
    before = (run / LOG).stat().st_size
    node.end()
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: link.poll().is_synced)

    assert before > 0  # those who were killed had begun
    assert (run / LOG).read_bytes() == body


def test_a_log_begun_anew_on_the_node_is_kept_apart_across_a_reconnect(run, node):
    node.run_on()
    node.append(LOG, b"the first attempt was longer\n")
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: content(run / LOG))
        node.wire.cut()
        (node.folder / LOG).write_bytes(b"second\n")
        wait_for(lambda: content(run / LOG) == b"second\n")

    assert (run / f"{LOG}.before-1").read_bytes() == b"the first attempt was longer\n"


def test_a_second_launcher_waits_until_the_first_is_gone(run, node):
    node.run_on()
    node.append(LOG, b"text\n")
    first, second = node.link(run), node.link(run)
    with closing(second):
        with closing(first):
            first.follow()
            wait_for(lambda: first.poll().phase == "running")
            second.follow()
            problem = wait_for(lambda: second.poll().phase == "running" and second.poll().problem)
            assert "another process of this machine mirrors this node" in problem
        node.append(LOG, b"more\n")
        node.end()
        wait_for(lambda: second.poll().is_synced)

    assert (run / LOG).read_bytes() == b"text\nmore\n"


# --- bridges that lie ------------------------------------------------------------------------------------------------


def test_nothing_that_a_bridge_says_breaks_the_link_or_leaves_the_run_folder(run, node, tmp_path):
    log = pack_message({"op": "log", "number": 0, "path": LOG, "replace": False})
    evil = [
        pack_message({"op": "log", "number": 0, "path": "../../evil.log"}) + pack_data(0, 0, b"x"),
        pack_message({"op": "file", "path": "/tmp/../evil.json", "text": "x"}),
        pack_message({"op": "file", "path": 5, "text": None}),
        pack_message({"op": "log", "number": [], "path": {}}),
        pack_message({"op": "status", "phase": "evil"}),
        pack_message({"op": "status", "phase": "running", "outcome": 5}),
        pack_message({"op": "status", "phase": "running", "health": {"deep": nested(100)}}),
        pack_message({"op": "status", "phase": "running", "health": {"many": [0] * 100_000}}),
        pack_message({"op": "synced", "sizes": {LOG: "many"}}),
        pack_message({"op": "synced", "sizes": [1]}),
        pack_message({"op": "beat", "id": 1 << 70, "now_ns": "soon"}),
        pack_message({"op": "swept", "left": {"1": 1}}),
        pack_message({"op": "error", "text": ["\x1b[31m"]}),
        pack_message({"op": "unheard of"}),
        log + pack_data(0, 1 << 40, b"far away"),
        log + pack_data(9, 0, b"nobody's"),
        b"J\xff\xff\xff\xff",
        b"D\x7f\xff\xff\xff",
        b"J\x00\x00\x00\x02[]",
        b"J\x00\x00\x00\x05hello",
        b"\x00" * 5000,
    ]
    for words in evil:
        node.wire.scripts.append(lambda stream, words=words: (stream.write(hello() + words), stream.wait_for_end()))
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


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


def test_words_of_a_node_are_harmless_by_the_time_they_are_seen(run, node):
    outcome = {"cause": "exit\x1b[2J", "error": "x" * 200_000, "ended_ns": float("nan"), "\x07key": ["\u202e"]}
    node.wire.script = lambda stream: (
        stream.write(hello() + status("ended", outcome=outcome)),
        stream.wait_for_end(),
    )
    link = node.link(run)
    with closing(link):
        link.follow()
        seen = wait_for(lambda: link.poll().outcome)

    assert seen["cause"] == "exit"
    assert len(seen["error"]) < 70_000
    assert seen["ended_ns"] is None
    assert seen["key"] == [""]


def test_a_node_that_claims_to_have_sent_all_is_not_believed(run, node):
    def script(stream: Stream) -> None:
        stream.write(hello())
        stream.take("follow")
        stream.write(status("ended", outcome={"cause": "exit"}))
        stream.write(pack_message({"op": "synced", "sizes": {LOG: 5}}))
        stream.wait_for_end()

    node.wire.script = script
    link = node.link(run)
    with closing(link):
        link.follow()
        wait_for(lambda: len(node.wire.processes) > 2)

    assert not link.poll().is_synced


def test_the_place_says_what_to_follow(run):
    place = NodePlace(run, "n", "/there", lead=False)

    assert place.follow_message() == {"op": "follow", "folder": "/there", "node": "n", "lead": False}
