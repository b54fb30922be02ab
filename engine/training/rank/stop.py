"""Stop requests (SIGTERM): immediate before training, between two steps during it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

KILL_MARGIN_S = 4.0  # a rank exits this long before the launcher would kill it
GRACE_S = 12.0 - KILL_MARGIN_S
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class StopRequest:
    """Records whether this process was asked to stop; `with stop.watch():` handles SIGTERM (main thread only).

    The first request raises KeyboardInterrupt. After `defer` it only sets `requested`, which the trainer polls.
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
        """Let requests only set `requested` from now on; the process exits `grace_s` after one at the latest."""
        self._interrupts, self._grace_s = False, grace_s

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Handle SIGTERM inside the body.

        A rank may block in a collective whose peer is gone, where no Python handler runs. So a thread reads the signal
        from a wakeup descriptor and ends the process after the grace period. The handler itself takes no lock: launcher
        and torchrun both send the signal, and the handler of the second could deadlock with that of the first.
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
            # After a request the handler stays: torchrun may repeat the signal late, which would cut off the last log.
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
