"""What a terminal receives."""

from __future__ import annotations

import contextlib
import os
import pty
from collections.abc import Callable


def on_terminal(start: Callable[[int], object]) -> str:
    """All that the process which `start` starts on a terminal writes there; returns at its end."""
    leader, follower = pty.openpty()
    start(follower)
    os.close(follower)
    received = b""
    with contextlib.suppress(OSError):  # the last holder of the other end is gone
        while block := os.read(leader, 65536):
            received += block
    os.close(leader)
    return received.decode()
