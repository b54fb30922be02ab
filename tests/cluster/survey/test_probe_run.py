"""Asking a node: whatever it does, the answer comes in bounded time and memory, and nothing missing looks healthy."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from testkit.check_fakes import GONE, HEALTHY, SILENCE, Answer, SurveyedNode, answer, frame
from testkit.machine_clock import at_most, machine_time

from cluster.checks.groups.host import SYSTEM
from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host
from cluster.survey.facts import ANSWER_BYTES, survey_here, survey_node
from cluster.survey.section import NodeProbe, Question, SectionState

HOST = Host("n1", "192.0.2.1")


def ask(tell: Answer, timeout_s: float = 5.0, **connection: object) -> NodeProbe:
    return survey_node(SurveyedNode(HOST, tell, **connection), [], timeout_s=timeout_s)


def test_the_whole_probe_is_one_command_with_the_script_on_stdin() -> None:
    connection = SurveyedNode(HOST, answer({"host.disk": "ok", "host.cpu": ("no", 1)}))
    probe = survey_node(connection, [SYSTEM], settings={"BURST_IMAGE": "a b; id"})
    assert connection.commands == [["date", "+%s.%N"], ["sh", "-s"]]
    (script,) = connection.scripts
    assert "export BURST_IMAGE='a b; id'\n" in script
    assert "section host.system " in script
    assert connection.processes[-1].is_cut
    assert (probe.node, probe.trouble, probe.section("host.disk").ok) == ("n1", "", True)
    assert probe.section("host.cpu").exit_code == 1


def half(end: bytes = b"") -> Answer:
    """A whole section, half a section, then `end`."""

    def told(fence: str) -> Iterator[bytes]:
        yield frame(fence, "host.disk", "ok")
        yield f"\n{fence} begin host.cpu\nhalf of it".encode()
        if end:
            yield end

    return told


def assert_half(probe: NodeProbe) -> None:
    assert probe.section("host.disk").ok
    assert probe.section("host.cpu").state is SectionState.CUT_OFF
    assert probe.section("host.memory").state is SectionState.MISSING


def drip(fence: str) -> Iterator[bytes]:
    while True:
        time.sleep(0.02)
        yield b"."


SICK = {"exit_code": 2, "stderr": b"sh: \x1b[31mout of memory\n"}
CLOSED = b"This account is currently not available.\n"


@pytest.mark.parametrize(
    ("tell", "connection", "trouble"),
    [
        (half(GONE), {}, "the connection ended while a command ran"),
        (half(SILENCE), {}, "not complete within 0.3 s"),
        (half(), SICK, "exit code 2.*sh: out of memory"),
        (drip, {}, "not complete within 0.3 s"),
        (lambda fence: iter([CLOSED]), {"exit_code": 1}, "This account is currently not available."),
    ],
)
def test_half_an_answer_comes_in_time_and_says_why_it_is_half(
    tell: Answer, connection: dict[str, object], trouble: str
) -> None:
    with at_most(2):
        probe = ask(tell, timeout_s=0.3, **connection)
    assert re.search(trouble, probe.trouble)
    if probe.sections:
        assert_half(probe)


def test_a_flood_is_cut_and_takes_bounded_memory() -> None:
    def flood(fence: str) -> Iterator[bytes]:
        yield frame(fence, "host.disk", "ok")
        yield f"\n{fence} begin host.cpu\n".encode()
        for _ in range(3200):
            yield b"x" * (1 << 15)  # 100 MiB in all
        yield frame(fence, "host.memory", "ok")

    tracemalloc.start()
    try:
        probe = ask(flood)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_half(probe)
    assert "longer than 4 MiB" in probe.trouble
    assert peak < 5 * ANSWER_BYTES


def test_a_node_that_does_not_even_tell_the_time_is_an_error() -> None:
    class Stuck(SurveyedNode):
        def run(self, *_: object, **__: object) -> None:
            raise SshError("n1", SshFailure.COMMAND_TIMEOUT, "a command did not end within 10 s")

    with pytest.raises(SshError, match="did not end"):
        survey_node(Stuck(HOST, HEALTHY), [])


@pytest.mark.parametrize("ahead_s", [-7.5, 0.0, 2.0])
def test_the_clock_is_read_against_the_middle_of_the_round_trip(ahead_s: float) -> None:
    probe = ask(HEALTHY, ahead_s=ahead_s)
    assert probe.clock_offset_s == pytest.approx(ahead_s, abs=0.05)
    assert 0 < probe.clock_error_s < 0.5


@pytest.mark.parametrize("shape", ["{:.0f}\n", "{:.0f}.%N\n", "{:.0f}.\n"])
def test_whole_seconds_of_busybox_are_believed_to_half_a_second(shape: str) -> None:
    probe = ask(HEALTHY, clock=shape.format(int(time.time()) + 100).encode())
    assert probe.clock_offset_s == pytest.approx(100, abs=0.6)
    assert probe.clock_error_s >= 0.5


@pytest.mark.parametrize("clock", [b"", b"date: invalid option\n", b"-5", b"nan", b"\xff\xfe"])
def test_a_time_that_makes_no_sense_is_none(clock: bytes) -> None:
    assert ask(HEALTHY, clock=clock).clock_offset_s is None


@pytest.mark.parametrize(
    ("end", "words"),
    [("sleep 60", "not complete within 5 s"), ("exit 4", "exit code 4"), ("setsid sleep 20 &", "")],
)
def test_this_machine_is_given_up_in_time_and_may_break_off_or_leave_processes_behind(end: str, words: str) -> None:
    begin = machine_time()
    # Behind the end of its own section the shell itself does as `end` says.
    probe = survey_here([Question("t.one", 5, f"echo here\nEND\n{end}\n: <<'END'")], timeout_s=5)
    assert (probe.section("t.one").output, probe.clock_offset_s) == ("here", None)
    assert words in probe.trouble
    assert bool(words) == bool(probe.trouble)
    assert machine_time() - begin < 15
