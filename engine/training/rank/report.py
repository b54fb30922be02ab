"""What a rank tells the outside while it runs, even while it hangs: its place, its stacks, its collectives.

    logs/<node>/rank<NNNN>.status.json   {rank, pid, node, step, phase, micro_step, advances, ended}, replaced
    logs/<node>/rank<NNNN>.stacks        the stacks of all threads, appended by faulthandler: on request by a thread of
                                         the rank; on SIGUSR1 by a signal handler in C, so also while something holds
                                         the interpreter
    logs/<node>/rank<NNNN>.flight.json   the answer to a request, written after the stacks
    logs/<node>/flight.request           the request, whose content is a nonce

SIGUSR1 kills a process that does not listen: only a .stacks file whose first line names the process's pid says that it
does. It is for a rank that does not answer the request: a signal handler reads the frames of threads that run
meanwhile, which crashes a process about once in 4,000 dumps. Nothing here may end a rank: a full disk or a missing
folder costs the report, not the run. Standard library only.
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
    """Where a rank is; the trainer keeps it current so that an error, or somebody outside, can say where it was.

    step          the optimizer step that runs, from 1; micro_step: of it, from 0
    phase         import torch, start, prepare data, build model, measure peak, restore, first weights; in a step load
                  batch, count labels, forward, loss, backward, optimizer; evaluate; train when it is none of these
    advances      how often a phase said that it goes on: data, batches of an evaluation, parts of a save
    ended         ok, or the type of the error
    waits         knows for whom the rank waits
    stop          whether it was asked to stop
    faults        what it was told to suffer
    reserve       address space (untouched, so no memory) for saying what went wrong after memory ran out
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
        """What the status file says of it."""
        return {name: getattr(self, name) for name in _FACTS}

    def advance(self) -> None:
        """The phase goes on: whoever watches shall not take a long one for a hang."""
        self.advances += 1

    def report_to(self, rank: int, node: str, log: Path) -> None:
        """From now on files beside the `log` of a rank say where it is."""
        self._report = RankReport(self, {"rank": rank, "pid": os.getpid(), "node": node}, log)

    def end_report(self, ended: str) -> None:
        """The rank is about to leave; `ended` is ok or the type of its error."""
        self.ended = ended
        if self._report is not None:
            self._report.close()
            self._report = None


class RankReport:
    """Writes the files of one rank until `close`; never raises.

    A thread looks at the status and writes what has changed: to replace a file may take milliseconds, on storage that
    nodes share more. So the file is exact while a rank sleeps or waits, and some 0.2 s old when it was
    stopped or holds the interpreter.
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
        with contextlib.suppress(RuntimeError):  # no thread to be had
            self._thread.start()

    def close(self) -> None:
        """Writes the last status."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._write()

    def _watch(self) -> None:
        """Life of the thread."""
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
        """The flight record, or the error it raised: torch's recorder is no public interface."""
        try:
            return flight_record(self._status.waits)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def _listen_for_stacks(path: Path, first_line: str) -> int:
    """The descriptor of the .stacks file, into which SIGUSR1 writes, too; open as long as the process lives."""
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
    """Replaces `path` without a sync: after a crash of the machine nobody asks for it."""
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
