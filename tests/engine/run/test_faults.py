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
from hypothesis import given
from hypothesis import strategies as st
from testkit.waiting import wait_for

from engine.config.errors import ConfigError
from engine.runs.folder import describe_error
from engine.training.rank.faults import (
    FLOOD_LINES,
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


def test_several_faults_are_separated_by_commas() -> None:
    assert parse_faults("kill;1;3, slow:0.5;0;10,nan;2;7", 4) == (
        Fault("kill", 1, 3),
        Fault("slow", 0, 10, 0.5),
        Fault("nan", 2, 7),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill", "expected kind;rank;step"),
        ("kill;1;3;4", "expected kind;rank;step"),
        ("kil;1;3", "there is no fault 'kil'; known: abort, config"),
        ("kill;one;3", "rank 'one' is no whole number"),
        ("kill;-1;3", "rank '-1' is no whole number"),
        ("kill;1;0", "counted from 1"),
        ("kill;4;3", "there is no rank 4 among 4"),
        ("kill;1;³", "step '³' is no whole number"),
        ("kill:2;1;3", "slow takes seconds"),
        ("slow;1;3", "slow takes seconds"),
        ("slow:0;1;3", "no seconds above 0"),
        ("slow:nan;1;3", "no seconds above 0"),
        ("slow:soon;1;3", "no seconds above 0"),
        ("disk;1;3", "only rank 0 writes metrics"),
        ("", "expected kind;rank;step"),
    ],
)
def test_a_mistake_is_named_with_what_is_legal(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="BURST_FAULT") as caught:
        parse_faults(text, 4)
    assert words in str(caught.value)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults("kil;1;3,kill;1;1,slow;2;2", 4)
    assert len(caught.value.problems) == 2


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse_faults(text, 4)
    except ConfigError:
        return


@given(st.sampled_from([*STRIKES, "nan"]), st.integers(0, 7), st.integers(1, 10**6))
def test_what_is_named_is_what_is_parsed(kind: str, rank: int, step: int) -> None:
    assert parse_faults(f"{kind};{rank};{step}", 8) == (Fault(kind, rank, step),)


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
    faults = Faults(parse_faults("nan;0;3,raise;0;5,disk;0;2", 1))
    for step in (None, 1, 2, 4):
        faults.at_forward(step)
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


@pytest.mark.parametrize(
    ("kind", "code"),
    [("kill", -9), ("segv", -11), ("abort", -6), ("exit0", 0), ("exit7", 7)],
)
def test_a_process_ends_as_it_was_told(kind: str, code: int) -> None:
    process = struck(kind)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code
    assert output.decode() == f"BURST_FAULT: now {kind} on rank 0 at step 3\n"


def struck(kind: str) -> subprocess.Popen[bytes]:
    """A process that runs into a fault."""
    command = [sys.executable, "-c", STRIKE, f"{kind};0;3"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


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


def test_a_slow_rank_is_slow_from_its_step_on() -> None:
    faults = Faults(parse_faults("slow:0.05;0;3", 1))
    # The best of several: a machine that is busy with something else may slow any one of them.
    assert min(duration_s(faults, 2) for _ in range(20)) < 0.04
    assert duration_s(faults, 3) >= 0.05
    assert duration_s(faults, 9) >= 0.05


def duration_s(faults: Faults, step: int) -> float:
    started = time.monotonic()
    faults.at_forward(step)
    return time.monotonic() - started


def test_a_flood_has_its_million_lines() -> None:
    output, _ = struck("flood").communicate(timeout=200)
    assert output.count(b"\n") == FLOOD_LINES + 1
    assert output.endswith(b"flood line 999999\n")


def test_garbage_holds_every_byte_and_one_very_long_line() -> None:
    output, _ = struck("garbage").communicate(timeout=200)
    assert bytes(range(256)) in output
    assert b"\x1b[2J" in output
    assert max(map(len, output.split(b"\n"))) == LONG_LINE_BYTES


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
