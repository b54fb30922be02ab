"""Status files that a rank writes while it runs, even while it hangs: its position, stacks and collectives.

    logs/<node>/rank<NNNN>.status.json   {rank, pid, node, step, phase, micro_step, advances, ended}, replaced
    logs/<node>/rank<NNNN>.stacks        the stacks of all threads, appended by faulthandler: on request by a thread of
                                         the rank; on SIGUSR1 by a signal handler in C, so also while something holds
                                         the interpreter
    logs/<node>/rank<NNNN>.flight.json   the answer to a request, written after the stacks
    logs/<node>/flight.request           the request, whose content is a nonce

SIGUSR1 kills a process without the handler, so send it only if the first line of the .stacks file names the process's
pid, and only to a rank that does not answer the request: a signal handler reads the frames of threads that run
meanwhile, which crashes a process about once in 4,000 dumps. Nothing here may end a rank: with a full disk or a missing
folder the report is lost, not the run. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.distributed.waits import WaitClock
from engine.runs.oom import RESERVE_BYTES
from engine.training.rank.faults import NO_FAULTS, Faults
from engine.training.rank.flight import flight_record
from engine.training.rank.stop import StopRequest

STATUS_INTERVAL_S = 0.2
REQUEST_NAME = "flight.request"
MAX_NONCE_BYTES = 200
_FACTS = ("step", "phase", "micro_step", "advances", "ended")


class RankStatus:
    """The position of a rank in its run; the trainer updates it, errors and the status file report it.

    Attributes:
        step: Current optimizer step, from 1.
        micro_step: Of the step, from 0.
        phase: import torch, start, prepare data, build model, measure peak, restore, first weights; within a step load
            batch, count labels, forward, loss, backward, optimizer; evaluate; train between these.
        advances: Progress counter of long phases: data, batches of an evaluation, parts of a save.
        ended: ok, or the type of the error.
        waits: Counts waits for other ranks.
        stop: The stop request.
        faults: Injected faults.
        reserve: Address space (untouched, so no memory), freed to report an error after memory ran out.
    """

    def __init__(self) -> None:
        self.waits = WaitClock()
        self.stop = StopRequest()
        self.faults: Faults = NO_FAULTS
        self.reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self.step: int | None = None
        self.micro_step = 0
        self.phase: str | None = None
        self.advances = 0
        self.ended: str | None = None
        self._report: RankReport | None = None

    def facts(self) -> dict[str, Any]:
        """Return the fields of the status file."""
        return {name: getattr(self, name) for name in _FACTS}

    def advance(self) -> None:
        """Report progress within a phase, so that hang detection does not take a long one for a hang."""
        self.advances += 1

    def report_to(self, rank: int, node: str, log: Path) -> None:
        """Start writing status files next to the rank's `log`."""
        self._report = RankReport(self, {"rank": rank, "pid": os.getpid(), "node": node}, log)

    def end_report(self, ended: str) -> None:
        """Write the last status and stop reporting; `ended` is ok or the type of the error."""
        self.ended = ended
        if self._report is not None:
            self._report.close()
            self._report = None


class RankReport:
    """Writes the status files of one rank until `close`; never raises.

    A thread polls the status and writes changes, since replacing a file takes milliseconds, or more on shared storage.
    So the file is exact while a rank sleeps or waits, and up to about 0.2 s old if the process is stopped or holds the
    GIL.
    """

    def __init__(self, status: RankStatus, who: Mapping[str, Any], log: Path) -> None:
        self._status, self._who = status, who
        self._file, self._flight = log.with_suffix(".status.json"), log.with_suffix(".flight.json")
        self._request = log.with_name(REQUEST_NAME)
        self._stop = threading.Event()
        self._stacks: int | None = None
        with contextlib.suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = _listen_for_stacks(log.with_suffix(".stacks"), f"# rank {who['rank']}, pid {who['pid']}\n")
        with contextlib.suppress(OSError):
            self._flight.unlink(missing_ok=True)  # of an earlier attempt
        self._answered = _read_nonce(self._request)
        self._write()
        self._thread = threading.Thread(target=self._watch, name="rank-report", daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit of threads is reached
            self._thread.start()

    def close(self) -> None:
        """Write the last status."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._write()

    def _watch(self) -> None:
        """Poll status and flight requests; the thread's body."""
        while not self._stop.wait(STATUS_INTERVAL_S):
            if self._status.facts() != self._written:
                self._write()
            nonce = _read_nonce(self._request)
            if nonce is not None and nonce != self._answered:
                self._answered = nonce
                if self._stacks is not None:
                    # This thread holds the GIL meanwhile, so no frame changes while it is read.
                    faulthandler.dump_traceback(self._stacks, all_threads=True)
                _replace(self._flight, {"nonce": nonce, **self._who, **self._record()})

    def _write(self) -> None:
        self._written = self._status.facts()
        _replace(self._file, {**self._who, **self._written})

    def _record(self) -> dict[str, Any]:
        """Return the flight record, or the error it raised: torch's recorder is not a public interface."""
        try:
            return flight_record(self._status.waits)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def _listen_for_stacks(path: Path, first_line: str) -> int:
    """Make SIGUSR1 write stacks to `path`; return its descriptor, which stays open for the life of the process."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)
    os.write(descriptor, first_line.encode())
    return descriptor


def _read_nonce(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_NONCE_BYTES).decode("utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` atomically, without a sync: it is not needed after a crash of the machine."""
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError, MemoryError):
        content = json.dumps(document, default=str).encode("utf-8", errors="replace") + b"\n"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            is_whole = os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
        if is_whole:
            temporary.replace(path)
