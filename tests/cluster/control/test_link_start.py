"""Starts over a wire that breaks: a supervisor is started once, and its owner knows it or is told why not."""

from __future__ import annotations

import threading

import pytest
from agent_rig import FAST, HOST, LOG, NODE, FakeNode, Stream, begin, closing, spec_of, status
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.control.link import StartRefusedError
from cluster.control.ssh_link import LinkTiming, SshLink
from cluster.errors import SshError, SshFailure


class Supervisors:
    """A script of agents that start supervisors: at most one, like those of the nodes, and they know the request."""

    def __init__(self, node: FakeNode) -> None:
        self.node, self.started, self.start_id = node, 0, ""

    def script(self, *, dies: str = ""):
        """dies: where the agent breaks off: at once, when asked, when started."""

        def serve(stream: Stream) -> None:
            while dies != "at once" and (question := stream.next()) is not None:
                spec = question.get("start")
                if spec is None:
                    stream.say(status=status("running" if self.started else "none"))
                    continue
                if dies == "asked":
                    return
                if not self.started:
                    self.started, self.start_id = 1, spec["start_id"]
                elif not (question["again"] and spec["start_id"] == self.start_id):
                    stream.say(refused={"kind": "exists", "text": "this run was started here before"})
                    continue
                if dies == "started":
                    return
                stream.say(started=1)

        return serve


@pytest.mark.parametrize(
    "breaks",
    [[], ["at once"], ["asked"], ["started"], ["asked", "asked", "started"], ["started", "at once", "at once"]],
)
def test_a_start_whose_answer_is_lost_is_asked_for_again_as_the_same(run, node, breaks):
    supervisors = Supervisors(node)
    node.wire.scripts.extend(supervisors.script(dies=place) for place in breaks)
    node.wire.script = supervisors.script()
    link = node.link(run)
    with closing(link):
        begin(link, spec_of(node))
        link.follow()
        wait_for(lambda: link.poll().phase == "running")

    assert supervisors.started == 1


def test_a_run_that_was_there_before_is_refused_not_taken_over(run, node):
    supervisors = Supervisors(node)
    supervisors.started = 1
    node.wire.script = supervisors.script()
    link = node.link(run)
    with closing(link), pytest.raises(StartRefusedError, match="node1: this run was started here before") as caught:
        begin(link, spec_of(node))

    assert caught.value.kind == "exists"


def test_the_files_of_an_earlier_attempt_are_not_copied_before_the_start_is_answered(run, node):
    node.append(LOG, b"of an earlier attempt\n")
    link = node.link(run)
    asked: list[bool] = []

    def script(stream: Stream) -> None:
        while "start" not in (question := stream.next()):
            stream.say()
        for _ in range(3):
            stream.say()
            question = stream.next()
            asked.append("follow" in question or "budget" in question)
        node.run_on()
        stream.say(started=1)
        node.serve(stream)

    node.wire.script = script
    with closing(link):
        link.follow()
        begin(link, spec_of(node))
        wait_for(lambda: (run / LOG).exists())

    assert asked == [False] * 3


def test_files_too_large_for_a_message_are_refused_before_anything_is_sent(run, node):
    link = node.link(run)
    spec = spec_of(node)._replace(files=(("config.yaml", "x" * (9 << 20)),))
    with closing(link), pytest.raises(StartRefusedError, match="too large"):
        begin(link, spec)

    assert node.wire.connects == 0


def test_who_cannot_be_reached_refuses_the_start_in_words(run, node):
    node.wire.refusals.extend(SshError(NODE, SshFailure.TIMEOUT, "no answer", "is the node up?") for _ in range(1000))
    link = node.link(run, LinkTiming(first_pause_s=0.01, longest_pause_s=0.05, start_s=2.0))
    with closing(link), pytest.raises(StartRefusedError) as caught:
        begin(link, spec_of(node))

    assert caught.value.kind == "unreachable"
    assert str(caught.value) == "node1: no answer in 2 s: no answer; is the node up?"
    assert node.wire.connects > 3


@pytest.mark.parametrize("kind", [SshFailure.AUTH, SshFailure.HOST_KEY_UNKNOWN, SshFailure.HOST_KEY_CHANGED])
def test_what_only_a_person_can_mend_is_not_tried_again(run, node, kind):
    node.wire.refusals.extend(SshError(NODE, kind, "text") for _ in range(1000))
    link = node.link(run, LinkTiming(start_s=20.0))
    since = machine_time()
    with closing(link), pytest.raises(StartRefusedError, match="node1: text") as caught:
        begin(link, spec_of(node))

    assert caught.value.kind == "unreachable"
    assert machine_time() - since < 5


def test_a_start_ends_when_its_link_is_closed(run, node):
    node.wire.script = lambda stream: stream.wait_for_end()
    link = node.link(run)
    threading.Timer(0.2, link.close).start()

    with pytest.raises(StartRefusedError, match="given up"):
        begin(link, spec_of(node))
    assert link.join(60.0)
    link.follow(), link.beat(), link.stop("x", 0.0), link.request_stacks("n"), link.close()
    with pytest.raises(StartRefusedError):
        begin(link, spec_of(node))


def test_the_end_of_a_link_is_told_once_also_when_it_never_began(run, node):
    told: list[int] = []
    for begins in (False, True):
        link = SshLink(HOST, node.wire.connect, node.place(run), FAST, on_end=lambda: told.append(1))
        if begins:
            link.follow()
        link.close()
        link.close()
        assert link.join(60.0)

    assert len(told) == 2
