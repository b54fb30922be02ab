"""A clock for upper bounds: seconds in which this machine gave programs their turn.

Whoever claims that something takes less than a second claims it of a machine that runs. A virtual machine may stand
still for seconds while its host is busy; `machine_time()` leaves that out and counts everything else, so the bounds can
stay narrow. A process of its own counts, in naps of a hundredth of a second, and of each nap only so much: work of the
tests seldom delays the naps of an idle process by more, and nothing that the tests' own process does hides from it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

NAP_S = 0.01
COUNTED_S = 0.1  # of one nap, however long it took
_START_S = 60.0
_STARTING = threading.Lock()


def machine_time() -> float:
    """Seconds since some moment, as time.monotonic(), but for stretches in which the machine stood still."""
    with _STARTING:  # threads that ask at once share one counting process
        shared = _counter()
    return float(struct.unpack("d", shared[:8])[0])


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """The block takes less than so many of them."""
    begin = machine_time()
    yield
    took_s = machine_time() - begin
    assert took_s < seconds, f"{took_s:.2f} s, expected less than {seconds:g}"


@functools.cache
def _counter() -> mmap.mmap:
    """What the counting process writes; it ends with this one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack("d", 0.0))
        file.flush()
        shared = mmap.mmap(file.fileno(), 8)
        command = [sys.executable, "-S", __file__, file.name, str(os.getpid())]
        atexit.register(_end, subprocess.Popen(command, stdin=subprocess.DEVNULL))
        give_up_at = time.monotonic() + _START_S
        while struct.unpack("d", shared[:8])[0] == 0.0:
            if time.monotonic() > give_up_at:
                raise RuntimeError("the machine clock does not tick")
            time.sleep(NAP_S)
    return shared


def _end(counting: subprocess.Popen[bytes]) -> None:
    counting.kill()
    counting.wait()


def _count(path: str, parent: int) -> None:
    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    total, last = 0.0, time.monotonic()
    while os.getppid() == parent:
        time.sleep(NAP_S)
        now = time.monotonic()
        total += min(now - last, COUNTED_S)
        last = now
        shared[:8] = struct.pack("d", total)


if __name__ == "__main__":
    _count(sys.argv[1], int(sys.argv[2]))
