"""SIGTERM: a clean stop where the loop can look, a certain end where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from testkit.waiting import wait_for

from cluster.agent.messages import STOP_GRACE_S
from engine.training.rank.stop import GRACE_S, KILL_MARGIN_S, TERMINATED_EXIT_CODE, StopRequest

STUCK = """
import time, threading
from engine.training.rank.stop import StopRequest
stop = StopRequest()
stop.defer(0.2)
with stop.watch():
    print("ready", flush=True)
    threading.Lock().acquire(); time.sleep(30)
"""


# The launcher and torchrun both send it: the second may come at any line of what the first one's handler does.
TWICE = """
import signal, sys
from engine.training.rank.stop import StopRequest
def again_at(number):
    left = [number]
    def trace(frame, event, _):
        left[0] -= event == "line"
        if left[0] == 0:
            left[0] -= 1
            signal.raise_signal(signal.SIGTERM)
        return trace
    return trace
interrupted = 0
for number in range(1, 30):
    stop = StopRequest()
    with stop.watch():
        try:
            sys.settrace(again_at(number))
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            interrupted += 1
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
stop = StopRequest()
with stop.watch():
    stop.defer(10.0)
    for number in range(1, 30):
        sys.settrace(again_at(number))
        signal.raise_signal(signal.SIGTERM)
        sys.settrace(None)
assert interrupted == 29
"""


def test_deferred_sigterm_inside_the_watch_is_a_request_whose_echo_after_it_ends_nothing() -> None:
    assert GRACE_S + KILL_MARGIN_S == STOP_GRACE_S  # what a launcher waits
    before, stop = signal.getsignal(signal.SIGTERM), StopRequest()
    with StopRequest().watch():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before  # as nobody asked for anything
    try:
        with stop.watch():
            stop.defer(10.0)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: stop.requested)
        assert signal.getsignal(signal.SIGTERM) not in (before, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_never_reaches_an_edge_is_ended_after_the_grace() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=200) == TERMINATED_EXIT_CODE
    process.stdout.close()


def test_a_second_signal_does_not_deadlock() -> None:
    assert subprocess.run([sys.executable, "-c", TWICE], timeout=60).returncode == 0
