"""Starts over a wire that breaks: a supervisor is started once, and its owner knows it or is told why not."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from agent_rig import LOG, NODE, FakeNode, Script, Stream, begin, closing, spec_of, status, swept, wait_for_ends
from testkit.machine_clock import machine_time
from testkit.waiting import wait_for

from cluster.control.link import StartRefusedError
from cluster.control.ssh_link import LinkTiming, SharedPool
from cluster.errors import SshError, SshFailure
from cluster.launch.local import LocalLink
from cluster.ssh.session import SshPool


class Supervisors:
    """A script of agents that start supervisors: at most one, like those of the nodes, and they know the request."""

    def __init__(self, node: FakeNode) -> None:
        self.node, self.started, self.start_id = node, 0, ""

    def script(self, dies: str = "") -> Script:
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
    node.wire.scripts.extend(supervisors.script(place) for place in breaks)
    node.wire.script = supervisors.script()
    link = node.link(run)
    with closing(link):
        begin(link, spec_of(node))
        link.follow()
        wait_for(lambda: link.poll().phase == "running")
    assert supervisors.started == 1

    other = node.link(run)  # who was not told of it is refused, and takes over nothing
    with closing(other), pytest.raises(StartRefusedError, match="node1: this run was started here before") as caught:
        begin(other, spec_of(node))
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


PERSONS = [SshFailure.AUTH, SshFailure.HOST_KEY_UNKNOWN, SshFailure.HOST_KEY_CHANGED, SshFailure.DNS]


@pytest.mark.parametrize("kind", [SshFailure.TIMEOUT, *PERSONS])
def test_who_cannot_be_reached_refuses_the_start_in_words_at_once_where_only_a_person_can_mend_it(run, node, kind):
    node.wire.refusals.extend(SshError(NODE, kind, "no answer", "is the node up?") for _ in range(1000))
    start_s = 20.0 if kind in PERSONS else 2.0
    link = node.link(run, LinkTiming(first_pause_s=0.01, longest_pause_s=0.05, start_s=start_s))
    since = machine_time()
    with closing(link), pytest.raises(StartRefusedError) as caught:
        begin(link, spec_of(node))
    assert caught.value.kind == "unreachable"
    text = "no answer; is the node up?"
    assert str(caught.value) == (f"node1: {text}" if kind in PERSONS else f"node1: no answer in 2 s: {text}")
    assert machine_time() - since < 5
    assert kind in PERSONS or node.wire.connects > 3


def test_a_start_ends_when_its_link_is_closed(run, node):
    node.wire.script = lambda stream: stream.wait_for_end()
    link = node.link(run)
    threading.Timer(0.2, link.close).start()
    with pytest.raises(StartRefusedError, match="given up"):
        begin(link, spec_of(node))
    wait_for_ends()
    link.follow(), link.beat(), link.stop("x", 0.0), link.request_stacks("n"), link.close()
    with pytest.raises(StartRefusedError):
        begin(link, spec_of(node))


def test_the_end_of_a_link_is_told_once_also_when_it_never_began_and_the_pool_ends_with_the_last(run, node):
    ended: list[int] = []

    class Pool(SshPool):
        def close(self) -> None:
            ended.append(1)
            super().close()

    shared, told = SharedPool(Pool(), 2), list[int]()
    for begins in (False, True):
        link = node.link(run, on_end=lambda: (shared.leave(), told.append(len(ended))))
        if begins:
            link.follow()
        link.close()
        link.close()
        wait_for(lambda begins=begins: len(told) == 1 + begins)
    assert told == [0, 1]


def test_a_local_launch_does_not_load_what_ssh_takes():
    code = "import sys, cluster.control.runner, cluster.launch.local; sys.exit('paramiko' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_is_gone_is_a_problem_in_words_and_raises_nothing(tmp_path):
    link = LocalLink(tmp_path / "gone", "node1")
    for ask in (link.beat, lambda: link.stop("x", 0.0), lambda: link.request_stacks("n")):
        ask()
        assert "No such file" in (link.poll().problem or "")
    assert link.poll().phase == "none"
    assert swept(link) == ()
