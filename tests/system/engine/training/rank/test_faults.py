"""Faults on demand: the grammar of BURST_FAULT, and that every kind does what its name says."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from testkit import PYTHON_PATH
from testkit.waiting import wait_for

from engine.config.errors import ConfigError
from engine.runs.folder import describe_error
from engine.training.rank.faults import LONG_LINE_BYTES, NO_FAULTS, STRIKES, Fault, Faults, parse_faults, read_faults

STRIKE = """
import sys
from engine.training.rank.faults import Faults, parse_faults
Faults(parse_faults(sys.argv[1] + ";0;3", 9)).at_forward(3)
"""
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


def started(program: str, *args: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", program, *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


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
        ("slow:3601;1;3", "no seconds above 0"),
        ("disk;1;3", "only rank 0 writes metrics"),
    ],
)
def test_every_mistake_is_named_with_what_is_legal(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="BURST_FAULT") as caught:
        parse_faults(f"{text},kill;1;1,nan", 4)
    assert words in caught.value.problems[0]
    assert len(caught.value.problems) == 2


def test_faults_are_parsed() -> None:
    expected = (Fault("kill", 1, 3), Fault("slow", 0, 10, 0.5), Fault("slow", 0, 1, 3600.0), Fault("nan", 2, 7))
    assert parse_faults("kill;1;3, slow:0.5;0;10,slow:3600;0;1,nan;2;7", 4) == expected


def test_a_rank_injects_only_its_faults() -> None:
    faults, announced = read_faults(1, 2, {"BURST_FAULT": "raise;1;3,nan;0;2"})
    assert announced == ["raise on rank 1 at step 3", "nan on rank 0 at step 2"]
    assert faults.at_loss(2, 1.5) == 1.5
    with pytest.raises(RuntimeError, match="injected"):
        faults.at_forward(3)


def test_without_the_variable_there_are_no_faults() -> None:
    assert read_faults(0, 1, {}) == (NO_FAULTS, [])


def test_a_fault_is_injected_at_its_step_only(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults(parse_faults("nan;0;3,raise;0;5,disk;0;2,slow:0.05;0;6", 1))
    for step in (None, 1, 2, 4, 6, 9):  # a slow rank stays so
        started_s, loss = time.monotonic(), object()
        faults.at_forward(step)
        assert step not in (6, 9) or time.monotonic() - started_s >= 0.05
        assert faults.at_loss(step, loss) is loss
    faults.at_metrics(3)
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
    assert record["kind"] == found
    assert record["exit_code"] == exit_code
    assert kind != "oom_device" or record["memory"]["where"] == "device"


FLOOD = b"".join(b"flood line %d\n" % number for number in range(1_000_000))


@pytest.mark.parametrize(
    ("kind", "code"),
    [("kill", -9), ("segv", -11), ("abort", -6), ("exit0", 0), ("exit7", 7), ("flood", 0), ("garbage", 0)],
)
def test_a_fault_ends_its_process(kind: str, code: int) -> None:
    process = started(STRIKE, kind)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code
    first, _, printed = output.partition(b"\n")
    assert first == b"BURST_FAULT: now %s on rank 0 at step 3" % kind.encode()
    if kind == "garbage":
        assert all(part in printed for part in (bytes(range(256)), b"\x1b[2J"))
        assert max(map(len, printed.split(b"\n"))) == LONG_LINE_BYTES
    else:
        assert printed == (FLOOD if kind == "flood" else b"")


@pytest.mark.parametrize("kind", ["stop", "hang_sleep", "hang_gil"])
def test_a_hanging_process_can_be_killed(kind: str) -> None:
    with started(STRIKE, kind) as process:
        assert process.stdout is not None
        assert b"BURST_FAULT: now" in process.stdout.readline()
        expected = psutil.STATUS_STOPPED if kind == "stop" else psutil.STATUS_SLEEPING
        try:
            wait_for(lambda: psutil.Process(process.pid).status() == expected)
        finally:
            process.kill()
        assert process.wait(timeout=200) == -signal.SIGKILL


def test_hang_gil_blocks_other_threads() -> None:
    process = started(HOLD)
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
