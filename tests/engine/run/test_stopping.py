"""SIGTERM: a clean stop where the loop can look, a certain end where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from testkit.waiting import wait_for

from engine.training.rank.lifecycle import TERMINATED_EXIT_CODE, StopRequest

STUCK = """
import time, threading
from engine.training.rank.lifecycle import StopRequest
with StopRequest(grace_s=0.2).watch():
    print("ready", flush=True)
    threading.Lock().acquire(); time.sleep(30)
"""


def test_sigterm_inside_the_watch_is_a_request() -> None:
    stop = StopRequest()
    with stop.watch():
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stop.requested)


def test_the_former_handler_returns_after_the_watch() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().watch():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_never_reaches_an_edge_is_ended_after_the_grace() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=200) == TERMINATED_EXIT_CODE
    process.stdout.close()
