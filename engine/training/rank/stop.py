"""A request to stop a rank: at once while nothing could be lost, at an edge once it trains. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

KILL_MARGIN_S = 4.0  # before the launcher kills
GRACE_S = 12.0 - KILL_MARGIN_S
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Whether this process was asked to stop; `with stop.watch():` listens for SIGTERM (main thread only).

    A request ends what runs as Ctrl-C does, once; after `defer` it waits for whoever looks at `requested`.
    """

    def __init__(self) -> None:
        self._grace_s = GRACE_S
        self._interrupts = True
        self._event = threading.Event()
        self._done = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._event.is_set()

    def defer(self, grace_s: float) -> None:
        """From now on a request interrupts nothing: whoever looks for it has so long to come to an edge."""
        self._interrupts, self._grace_s = False, grace_s

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Listens until the block ends; outside of it SIGTERM ends the process at once, as before, but a request that
        came is the last: torchrun's echo of it may be late, and what a stopped rank writes would be cut off.

        A rank may sit in a collective whose peer is gone, where no Python handler runs. So the signal is read from a
        wakeup descriptor by a thread, which ends the process after the grace period. The handler itself takes no lock:
        launcher and torchrun both send the signal, and a handler that takes one would wait for itself in the second.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_handler = signal.signal(signal.SIGTERM, self._interrupt)
        old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait_for_signal, args=(reader,), name="stop-request", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._interrupts = False
            self._done.set()
            signal.set_wakeup_fd(old_descriptor)
            os.close(writer)
            thread.join()
            os.close(reader)
            if not self.requested:
                signal.signal(signal.SIGTERM, old_handler)

    def _interrupt(self, *_: Any) -> None:
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt

    def _wait_for_signal(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self._event.set()
                if not self._done.wait(self._grace_s):
                    os._exit(TERMINATED_EXIT_CODE)
                return
