"""SIGTERM becomes a request to stop at the next step edge, and a certain death if that edge does not come in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

KILL_MARGIN_S = 4.0  # before the launcher kills
GRACE_S = 12.0 - KILL_MARGIN_S
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Whether this process was asked to stop; `with stop.watch():` listens for SIGTERM (main thread only)."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._event = threading.Event()
        self._done = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._event.is_set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Listens until the block ends; outside of it SIGTERM ends the process at once, as before.

        A rank may sit in a collective whose peer is gone, where no Python handler runs. So the signal is read from a
        wakeup descriptor by a thread, which ends the process after the grace period.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_handler = signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait_for_signal, args=(reader,), name="stop-request", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            signal.set_wakeup_fd(old_descriptor)
            signal.signal(signal.SIGTERM, old_handler)
            os.close(writer)
            thread.join()
            os.close(reader)

    def _wait_for_signal(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self._event.set()
                if not self._done.wait(self._grace_s):
                    os._exit(TERMINATED_EXIT_CODE)
                return
