"""The clock of upper bounds goes as time does while the machine runs, and stands still when it stands still."""

from __future__ import annotations

import signal
import time

import psutil
from testkit.machine_clock import COUNTED_S, machine_time


def test_it_counts_what_the_clock_on_the_wall_counts() -> None:
    begin, began = machine_time(), time.monotonic()
    while time.monotonic() < began + 2.0:  # busy, and holding the interpreter: that counts too
        pass
    counted = machine_time() - begin
    assert 0.5 <= counted <= time.monotonic() - began + COUNTED_S


def test_it_never_runs_ahead_and_leaves_out_what_nobody_could_use() -> None:
    machine_time()
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (counting,) = [child for child in living if "machine_clock.py" in " ".join(child.cmdline())]
    begin = machine_time()
    counting.send_signal(signal.SIGSTOP)  # as the host stops a whole machine
    try:
        time.sleep(3.0)
    finally:
        counting.send_signal(signal.SIGCONT)
    assert machine_time() - begin <= 1.0 + COUNTED_S
