"""THE way in which tests wait for something to become so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")
WAIT_S = 200.0  # only ends the waiting for what hangs: machines that others share may be ten times slower for a while


def wait_for(
    condition: Callable[[], Answer],
    what: str | Callable[[], str] = "what the test waits for",
    timeout_s: float = WAIT_S,
    pause_s: float = 0.01,
) -> Answer:
    """What `condition` gives as soon as it is true; fails the test after `timeout_s`, naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(pause_s)
    return found
