"""Many hosts at once: bounded width, outcomes as they come, interrupts that leave quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from testkit import ROOT
from testkit.machine_clock import at_most
from testkit.waiting import wait_for

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host, Outcome, fan_out

HOSTS = [Host(f"n{number}", f"n{number}") for number in range(12)]


def test_outcomes_come_as_they_are_done_and_are_returned_in_the_order_of_hosts() -> None:
    gate = threading.Event()
    seen: list[str] = []

    def work(host: Host) -> str:
        if host.name == "n0":
            assert gate.wait(200)
        if host.name == "n3":
            raise SshError(host.name, SshFailure.REFUSED, "no")
        return host.name.upper()

    def note(outcome: Outcome[str]) -> None:
        seen.append(outcome.host.name)
        if len(seen) == len(HOSTS) - 1:
            gate.set()

    found = fan_out(HOSTS, work, on_outcome=note)
    assert seen[-1] == "n0"
    assert list(found) == [host.name for host in HOSTS]
    assert [name for name, outcome in found.items() if outcome.error] == ["n3"]
    assert found["n5"].value == "N5"


def test_no_more_than_width_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(3)

    def work(host: Host) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(200)
        time.sleep(0.02)  # for a fourth, should it be let in
        with lock:
            running -= 1

    fan_out(HOSTS, work, width=3)
    assert most == 3


def test_a_bug_in_the_work_is_raised_and_nothing_more_begins() -> None:
    begun, is_over = list[str](), threading.Event()

    def work(host: Host) -> None:
        begun.append(host.name)
        if host.name == "n0":
            raise KeyError(host.name)
        is_over.wait(200)

    with pytest.raises(KeyError):
        fan_out(HOSTS, work, width=1)
    is_over.set()
    wait_for(lambda: not any(thread.name.startswith("fan-out") for thread in threading.enumerate()), "its end")
    assert len(begun) <= 2


def test_an_interrupted_process_begins_nothing_more_and_does_not_wait_for_what_hangs(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import time\n"
        "from cluster.ssh.hosts import Host, fan_out\n"
        "def work(host):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(60)\n"
        "fan_out([Host('a', 'a'), Host('b', 'b')], work, width=1)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    with at_most(5):
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == -signal.SIGINT
    assert process.stdout.read() == b""
    process.stdout.close()
