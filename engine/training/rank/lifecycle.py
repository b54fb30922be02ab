"""How a run begins and ends on a rank: the moves of run.json, and a request to stop at the next step edge.

Rank 0 says running and completed; without a launcher ranks say the rest.

burst launch:   planned -> starting (launcher) -> running, completed (rank 0);   failed, cancelled, oom (launcher)
torchrun alone: planned -> starting, running, completed (rank 0);   failed, cancelled, oom (the rank that met it)
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.errors import BurstError
from engine.config.settings import load_config
from engine.runs.folder import FINAL_STATES, RUN_ID_VARIABLE, RunFolder, RunFolderError, describe_error
from engine.runs.oom import less_memory_text
from engine.training.rank.process import RankStatus

KILL_MARGIN_S = 4.0  # before the launcher kills
GRACE_S = 12.0 - KILL_MARGIN_S
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def run_states(
    run: RunFolder, status: RankStatus, *, rank: int, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Around all that a rank does: moves run.json to running at the start and to its final state at the end."""
    # Rank 0 looks at the run itself, because plan.sh sets the variable of a launcher that is not there.
    launched = _is_starting(run) if rank == 0 else RUN_ID_VARIABLE in environment
    try:
        if rank == 0:
            if not launched:
                run.transition("starting")
            _move_to_running(run)
        yield
    except BaseException as error:
        if not launched:
            _record_end(run, status, rank, error)
        raise
    if rank == 0:
        run.transition("completed", exit_code=0)


def _move_to_running(run: RunFolder) -> None:
    """Rank 0's move; a run that another rank has already ended stays so, and this rank meets the same end soon."""
    try:
        run.transition("running")
    except RunFolderError:
        if run.read_state()["state"] not in FINAL_STATES:
            raise


def _is_starting(run: RunFolder) -> bool:
    """Whether a living launcher has begun this attempt and waits for its ranks."""
    return run.read_state()["state"] == "starting" and run.is_alive() is not False


def _record_end(run: RunFolder, status: RankStatus, rank: int, error: BaseException) -> None:
    """Moves the run to failed, oom or cancelled; a final state that another rank wrote first stays."""
    if isinstance(error, KeyboardInterrupt):
        state, exit_code, failure = "cancelled", 130, None
    else:
        status.reserve = None  # given back, to say what went wrong
        facts = describe_error(error)
        state, exit_code = ("oom" if facts["kind"] == "oom" else "failed"), facts["exit_code"]
        kept = {key: facts[key] for key in ("kind", "type", "message", "exit_code", "memory")}
        place = {"rank": rank, "step": status.step, "phase": status.phase}
        failure = {**kept, **place, "advice": _advice(run, facts["memory"])}
    with contextlib.suppress(RunFolderError):
        run.transition(state, exit_code=exit_code, failure=failure)


def _advice(run: RunFolder, memory: Mapping[str, Any] | None) -> str | None:
    """What makes the run need less memory, for a run that ran out of it."""
    if memory is None:
        return None
    try:
        return less_memory_text(load_config(run.path / "config.yaml"), memory["where"])
    except BurstError:
        return None


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
        """Listens until the block ends; outside of it SIGTERM ends the process at once, as before, but a request that
        came is the last: torchrun's echo of it may be late, and what a stopped rank writes would be cut off.

        A rank may sit in a collective whose peer is gone, where no Python handler runs. So the signal is read from a
        wakeup descriptor by a thread, which ends the process after the grace period. The handler itself does nothing:
        launcher and torchrun both send the signal, and a handler that takes a lock would wait for itself in the second.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait_for_signal, args=(reader,), name="stop-request", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            signal.set_wakeup_fd(old_descriptor)
            os.close(writer)
            thread.join()
            os.close(reader)
            if not self.requested:
                signal.signal(signal.SIGTERM, old_handler)

    def _wait_for_signal(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self._event.set()
                if not self._done.wait(self._grace_s):
                    os._exit(TERMINATED_EXIT_CODE)
                return
