"""Starts over a wire that breaks: a supervisor is started once, and its owner knows it or is told why not."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from time import time_ns as now_ns

import pytest
from bridge_rig import FAST, HOST, NODE, RUN_ID, FakeNode, Stream, closing, hello, spec_of, status
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.control.link import StartRefusedError
from cluster.control.ssh_link import LinkTiming, SshLink
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


class Supervisors:
    """A script of bridges that start supervisors: at most one, like those of the nodes."""

    def __init__(self, node: FakeNode) -> None:
        self.node, self.started, self.asked = node, 0, 0

    def script(self, *, dies: str = "", ends: bool = False):
        """dies: where the bridge breaks off: at the hello, when asked, when started. ends: the run ends at once."""

        def serve(stream: Stream) -> None:
            if dies == "hello":
                return
            stream.write(hello())
            frame = stream.reader.next()
            while frame is not None:
                message = frame.message
                if message["op"] == "start":
                    self.asked += 1
                    if dies == "asked":
                        return
                    if self.started:
                        answer = {"op": "refused", "kind": "exists", "text": "this run was started here before"}
                    else:
                        self.started += 1
                        self.node.run_on()
                        if ends:
                            self.node.end()
                        answer = {"op": "started", "pid": 1}
                    if dies == "started":
                        return
                    stream.write(pack_message(answer))
                if message["op"] == "follow":
                    ended = self.node.read("outcome.json")
                    phase = "ended" if ended else "running" if self.started else "none"
                    stream.write(status(phase, outcome=ended))
                frame = stream.reader.next()

        return serve


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "breaks", [[], ["hello"], ["asked"], ["started"], ["asked", "asked", "started"], ["started", "hello", "hello"]]
)
def test_a_start_whose_answer_is_lost_is_looked_for_and_never_repeated(run, node, breaks, ends):
    supervisors = Supervisors(node)
    node.wire.scripts.extend(supervisors.script(dies=place, ends=ends) for place in breaks)
    node.wire.script = supervisors.script(ends=ends)
    link = node.link(run)
    with closing(link):
        link.start(spec_of(node))
        link.follow()
        wait_for(lambda: link.poll().phase == ("ended" if ends else "running"))

    assert supervisors.started == 1


@pytest.mark.parametrize("phase", ["running", "lost"])
def test_a_lost_start_that_is_still_being_done_is_looked_for_again(run, node, phase):
    def still_starting(stream: Stream) -> None:
        stream.write(hello())
        stream.take("follow")
        stream.write(status("none"))
        stream.take("start")
        stream.write(pack_message({"op": "refused", "kind": "exists", "text": "there is one already"}))
        stream.wait_for_end()

    def there(stream: Stream) -> None:
        stream.write(hello())
        stream.take("follow")
        stream.write(status(phase))
        stream.wait_for_end()

    node.wire.scripts.extend([Supervisors(node).script(dies="asked"), still_starting])
    node.wire.script = there
    link = node.link(run)
    with closing(link):
        if phase == "running":
            link.start(spec_of(node))
        else:
            with pytest.raises(StartRefusedError, match="there is one already"):
                link.start(spec_of(node))


def test_a_run_that_was_there_before_is_refused_not_taken_over(run, node):
    supervisors = Supervisors(node)
    supervisors.started = 1
    node.wire.script = supervisors.script()
    link = node.link(run)
    with closing(link), pytest.raises(StartRefusedError, match="node1: this run was started here before") as caught:
        link.start(spec_of(node))

    assert caught.value.kind == "exists"


def test_an_outcome_of_an_earlier_attempt_is_not_taken_for_ours(run, node):
    supervisors = Supervisors(node)
    supervisors.started = 1
    node.end(ended_ns=now_ns() - 10**9)
    node.wire.scripts.append(supervisors.script(dies="asked"))
    node.wire.script = supervisors.script()
    link = node.link(run)
    with closing(link), pytest.raises(StartRefusedError, match="started here before"):
        link.start(spec_of(node))


def test_the_files_of_an_earlier_attempt_are_not_mirrored_before_the_start_is_answered(run, node):
    node.append(LOG, b"of an earlier attempt\n")
    supervisors = Supervisors(node)
    node.wire.scripts.append(supervisors.script(dies="asked"))

    def script(stream: Stream) -> None:
        stream.write(hello())
        stream.take("follow")
        stream.write(pack_message({"op": "log", "number": 0, "path": LOG, "replace": False}))
        stream.write(pack_data(0, 0, b"of an earlier attempt\n"))
        stream.write(status("none"))
        stream.take("start")
        assert not (run / LOG).exists()
        node.run_on()
        stream.write(pack_message({"op": "started", "pid": 1}))

    node.wire.scripts.append(script)
    link = node.link(run)
    with closing(link):
        link.start(spec_of(node))
        wait_for(lambda: (run / LOG).exists())


def test_files_too_large_for_a_message_are_refused_before_anything_is_sent(run, node):
    link = node.link(run)
    spec = replace(spec_of(node), files=(("config.yaml", "x" * (9 << 20)),))
    with closing(link), pytest.raises(StartRefusedError, match="too large"):
        link.start(spec)

    assert node.wire.connects == 0


def test_who_cannot_be_reached_refuses_the_start_in_words(run, node):
    node.wire.refusals.extend(SshError(NODE, SshFailure.TIMEOUT, "no answer", "is the node up?") for _ in range(1000))
    link = node.link(run, LinkTiming(first_pause_s=0.01, longest_pause_s=0.05, start_s=2.0))
    with closing(link), pytest.raises(StartRefusedError) as caught:
        link.start(spec_of(node))

    assert caught.value.kind == "unreachable"
    assert str(caught.value) == "node1: no answer in 2 s: no answer; is the node up?"
    assert node.wire.connects > 3


@pytest.mark.parametrize("kind", [SshFailure.AUTH, SshFailure.HOST_KEY_UNKNOWN, SshFailure.HOST_KEY_CHANGED])
def test_what_only_a_person_can_mend_is_not_tried_again(run, node, kind):
    node.wire.refusals.extend(SshError(NODE, kind, "text") for _ in range(1000))
    link = node.link(run, LinkTiming(start_s=20.0))
    begin = machine_time()
    with closing(link), pytest.raises(StartRefusedError, match="node1: text") as caught:
        link.start(spec_of(node))

    assert caught.value.kind == "unreachable"
    assert machine_time() - begin < 5


def test_a_start_ends_when_its_link_is_closed(run, node):
    node.wire.script = lambda stream: stream.wait_for_end()
    link = node.link(run)
    threading.Timer(0.2, link.close).start()

    with pytest.raises(StartRefusedError, match="given up"):
        link.start(spec_of(node))
    assert link.join(5.0)
    link.follow(), link.beat(), link.stop("x", 0.0), link.request_stacks("n"), link.close()
    with pytest.raises(StartRefusedError):
        link.start(spec_of(node))


def test_the_end_of_a_link_is_told_once_also_when_it_never_began(run, node):
    told: list[int] = []
    for begins in (False, True):
        link = SshLink(HOST, node.wire, node.place(run), FAST, on_end=lambda: told.append(1))
        if begins:
            link.follow()
        link.close()
        link.close()
        assert link.join(5.0)

    assert len(told) == 2
