"""Faults on demand: the grammar of BURST_FAULT, and that every kind does what its name says."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from testkit.waiting import wait_for

from engine.config.errors import ConfigError
from engine.runs.folder import describe_error
from engine.training.rank.faults import (
    LONG_LINE_BYTES,
    NO_FAULTS,
    STRIKES,
    Fault,
    Faults,
    parse_faults,
    read_faults,
)

ROOT = Path(__file__).parents[3]
STRIKE = (
    "import sys; from engine.training.rank.faults import Faults, parse_faults\n"
    "Faults(parse_faults(sys.argv[1], 9)).at_forward(3)"
)


# It holds the interpreter from before the mark until it hangs in it: no beat comes between the two, however busy the
# machine is; one may be on its way.
HOLD = """
import ctypes, os, sys, threading, time
from engine.training.rank.faults import STRIKES

beats = 0

def beat():
    global beats
    while True:
        os.write(1, b".")
        beats += 1
        time.sleep(0.01)

threading.Thread(target=beat, daemon=True).start()
while beats < 3:
    time.sleep(0.01)
sys.setswitchinterval(1000)
time.sleep(0.05)
ctypes.PyDLL(None).write(1, b"!", 1)
STRIKES["hang_gil"]()
"""


def test_several_faults_are_separated_by_commas_and_so_are_mistakes() -> None:
    assert parse_faults("kill;1;3, slow:0.5;0;10,nan;2;7", 4) == (
        Fault("kill", 1, 3),
        Fault("slow", 0, 10, 0.5),
        Fault("nan", 2, 7),
    )
    with pytest.raises(ConfigError) as caught:
        parse_faults("kil;1;3,kill;1;1,slow;2;2", 4)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "expected kind;rank;step"),
        ("kil;1;3", "there is no fault 'kil'; known: abort, config"),
        ("kill;one;3", "rank 'one' is no whole number"),
        ("kill;1;0", "counted from 1"),
        ("kill;4;3", "there is no rank 4 among 4"),
        ("kill;1;³", "step '³' is no whole number"),
        ("kill:2;1;3", "slow takes seconds"),
        ("slow;1;3", "slow takes seconds"),
        ("slow:0;1;3", "no seconds above 0"),
        ("slow:nan;1;3", "no seconds above 0"),
        ("slow:soon;1;3", "no seconds above 0"),
        ("disk;1;3", "only rank 0 writes metrics"),
    ],
)
def test_a_mistake_is_named_with_what_is_legal(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="BURST_FAULT") as caught:
        parse_faults(text, 4)
    assert words in str(caught.value)


def test_a_rank_gets_its_own_faults_and_everybody_the_announcement() -> None:
    environment = {"BURST_FAULT": "raise;1;3,nan;0;2"}
    faults, announced = read_faults(1, 2, environment)
    assert announced == ["raise on rank 1 at step 3", "nan on rank 0 at step 2"]
    assert faults.at_loss(2, 1.5) == 1.5
    with pytest.raises(RuntimeError, match="injected"):
        faults.at_forward(3)


def test_without_the_variable_nothing_ever_happens() -> None:
    assert read_faults(0, 1, {}) == (NO_FAULTS, [])
    NO_FAULTS.at_forward(1)
    NO_FAULTS.at_metrics(1)
    loss = object()
    assert NO_FAULTS.at_loss(1, loss) is loss


def test_a_fault_strikes_at_its_step_only_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults(parse_faults("nan;0;3,raise;0;5,disk;0;2,slow:0.05;0;6", 1))
    for step in (None, 1, 2, 4, 6, 9):  # a slow rank stays so
        started = time.monotonic()
        faults.at_forward(step)
        assert step not in (6, 9) or time.monotonic() - started >= 0.05
        assert faults.at_loss(step, 2.0) == 2.0
    assert math.isnan(faults.at_loss(3, 2.0))
    with pytest.raises(OSError, match="No space left on device"):
        faults.at_metrics(2)
    said = ["BURST_FAULT: now nan on rank 0 at step 3", "BURST_FAULT: now disk on rank 0 at step 2"]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(
    ("kind", "found", "exit_code"),
    [("raise", "exception", 1), ("config", "config", 2), ("oom_host", "oom", 1), ("oom_device", "oom", 1)],
)
def test_what_is_raised_counts_as_what_it_plays(kind: str, found: str, exit_code: int) -> None:
    with pytest.raises(Exception, match="injected") as caught:
        STRIKES[kind]()
    record = describe_error(caught.value)
    assert (record["kind"], record["exit_code"]) == (found, exit_code)
    assert kind != "oom_device" or record["memory"]["where"] == "device"


def struck(kind: str) -> subprocess.Popen[bytes]:
    """A process that runs into a fault."""
    command = [sys.executable, "-c", STRIKE, f"{kind};0;3"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("kind", "code", "printed"),
    [
        ("kill", -9, b""),
        ("segv", -11, b""),
        ("abort", -6, b""),
        ("exit0", 0, b""),
        ("exit7", 7, b""),
        ("flood", 0, b"".join(b"flood line %d\n" % number for number in range(1_000_000))),
    ],
)
def test_a_process_prints_and_ends_as_it_was_told(kind: str, code: int, printed: bytes) -> None:
    process = struck(kind)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code
    assert output == b"BURST_FAULT: now %s on rank 0 at step 3\n" % kind.encode() + printed


def test_garbage_holds_every_byte_and_one_very_long_line() -> None:
    output, _ = struck("garbage").communicate(timeout=200)
    assert bytes(range(256)) in output
    assert b"\x1b[2J" in output
    assert max(map(len, output.split(b"\n"))) == LONG_LINE_BYTES


@pytest.mark.parametrize("kind", ["stop", "hang_sleep", "hang_gil"])
def test_a_process_that_hangs_stays_and_can_be_killed(kind: str) -> None:
    process = struck(kind)
    assert process.stdout is not None
    assert b"BURST_FAULT: now" in process.stdout.readline()
    expected = psutil.STATUS_STOPPED if kind == "stop" else psutil.STATUS_SLEEPING
    try:
        wait_for(lambda: psutil.Process(process.pid).status() == expected)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=200) == -signal.SIGKILL
    process.communicate()


def test_the_interpreter_is_held_so_that_no_other_thread_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    before = b""
    while not before.endswith(b"!"):
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, before
        before += byte
    time.sleep(2.0)
    process.kill()
    after, _ = process.communicate()
    assert before.count(b".") >= 3
    assert after.count(b".") <= 1
