"""Fault injection for tests and drills: BURST_FAULT="kind;rank;step", several separated by commas.

    kill segv abort stop    send SIGKILL, SIGSEGV, SIGABRT, SIGSTOP to the rank itself
    exit0 exit7             exit without output, with this exit code
    raise config            raise an exception, a configuration error
    oom_host oom_device     raise the error of exhausted host or device memory
    hang_sleep hang_gil     hang asleep, or in C code that holds the GIL
    nan                     replace the loss by NaN
    slow:SECONDS            sleep this long in this and every later step
    flood garbage           print 1,000,000 lines; raw bytes, terminal escapes and a line of 100 MB
    disk                    fail to write metrics as on a full disk (rank 0, which alone writes them)

All but disk occur in the first forward pass of the step, counted from 1. Parsing is pure. Without the variable a run
uses `NO_FAULTS`, whose calls do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.errors import ConfigError

FAULT_VARIABLE = "BURST_FAULT"
SLOW = "slow"
FLOOD_LINES = 1_000_000
LONG_LINE_BYTES = 100 * 2**20
_BLOCK_LINES = 10_000
_WHOLE = re.compile(r"[0-9]{1,9}")
_MUTEX_BYTES = 256  # more than a pthread_mutex_t anywhere


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, rank and step (from 1); `seconds` for slow."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0

    def __str__(self) -> str:
        kind = f"{self.kind}:{self.seconds:g}" if self.kind == SLOW else self.kind
        return f"{kind} on rank {self.rank} at step {self.step}"


def parse_faults(text: str, world_size: int) -> tuple[Fault, ...]:
    """Parse the faults in `text`, in order. Raises ConfigError with all mistakes."""
    problems: list[str] = []
    faults: list[Fault] = []
    for part in map(str.strip, text.split(",")):
        try:
            faults.append(_parse_fault(part, world_size))
        except ValueError as error:
            problems.append(f"{FAULT_VARIABLE}: {part!r}: {error}")
    if problems:
        raise ConfigError(problems)
    return tuple(faults)


def _parse_fault(part: str, world_size: int) -> Fault:
    fields = part.split(";")
    if len(fields) != 3:
        raise ValueError("expected kind;rank;step, such as kill;1;3")
    kind, colon, text = fields[0].partition(":")
    if kind not in STRIKES and kind not in ("nan", "disk", SLOW):
        known = ", ".join(sorted([*STRIKES, "nan", "disk", "slow:SECONDS"]))
        raise ValueError(f"there is no fault {kind!r}; known: {known}")
    if (kind == SLOW) != bool(colon):
        raise ValueError("slow takes seconds (slow:0.5;1;3), no other fault does")
    for name, field in zip(("rank", "step"), fields[1:], strict=True):
        if not _WHOLE.fullmatch(field):
            raise ValueError(f"{name} {field!r} is no whole number")
    rank, step = map(int, fields[1:])
    if rank >= world_size:
        raise ValueError(f"there is no rank {rank} among {world_size}")
    if step < 1:
        raise ValueError("steps are counted from 1")
    if kind == "disk" and rank != 0:
        raise ValueError("only rank 0 writes metrics")
    seconds = math.nan if colon else 1.0
    with contextlib.suppress(ValueError):
        seconds = float(text) if colon else seconds
    if not 0 < seconds <= 3600:
        raise ValueError(f"{text!r} are no seconds above 0 and up to 3600")
    return Fault(kind, rank, step, seconds if colon else 0.0)


class Faults:
    """Injects the faults of this rank; the calls do nothing without faults."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)

    def at_forward(self, step: int | None) -> None:
        """Inject faults in the forward pass of step `step` (from 1); may not return."""
        for fault in self._faults:
            if fault.kind == SLOW and step is not None and step >= fault.step:
                time.sleep(fault.seconds)
            elif fault.step == step and fault.kind in STRIKES:
                self._announce(fault)
                STRIKES[fault.kind]()

    def at_loss(self, step: int | None, loss: Any) -> Any:
        """Return `loss` (a number or tensor), or NaN instead."""
        for fault in self._faults:
            if fault.kind == "nan" and fault.step == step:
                self._announce(fault)
                return loss * math.nan
        return loss

    def at_metrics(self, step: int) -> None:
        """Inject faults before the metrics of step `step` (from 1) are written."""
        for fault in self._faults:
            if fault.kind == "disk" and fault.step == step:
                self._announce(fault)
                raise OSError(errno.ENOSPC, "No space left on device (injected)", "metrics.jsonl")

    def _announce(self, fault: Fault) -> None:
        print(f"{FAULT_VARIABLE}: now {fault}", flush=True)


NO_FAULTS = Faults()
FindFaults = Callable[[int, int], tuple[Faults, Sequence[str]]]  # (rank, world size) -> see `read_faults`


def read_faults(rank: int, world_size: int, environment: Mapping[str, str] = os.environ) -> tuple[Faults, list[str]]:
    """Return this rank's faults and a description of those of all ranks. Raises ConfigError on every rank alike."""
    text = environment.get(FAULT_VARIABLE, "").strip()
    if not text:
        return NO_FAULTS, []
    faults = parse_faults(text, world_size)
    return Faults([fault for fault in faults if fault.rank == rank]), [str(fault) for fault in faults]


def _raise(error: BaseException) -> None:
    raise error


def _run_out_of_device_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (injected).")


def _sleep_forever() -> None:
    while True:
        time.sleep(3600)


def _hold_the_interpreter() -> None:
    """Deadlock in C on a lock that this thread holds; PyDLL does not release the GIL."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)  # all zeros: an ordinary mutex, not taken
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _flood() -> None:
    for first in range(0, FLOOD_LINES, _BLOCK_LINES):
        sys.stdout.write("".join(f"flood line {first + index}\n" for index in range(_BLOCK_LINES)))
    sys.stdout.flush()


def _print_garbage() -> None:
    sys.stdout.flush()
    escapes = b"\x1b[2J\x1b]0;title\x07\x1b[31m[bold red]not markup[/]\x1b[999;999H\r\x9b1A\xe2\x80\xae\xff\xfe\x00\n"
    block = b"x" * 2**20
    with open(1, "wb", closefd=False) as out:  # buffered: os.write may write less than it is given
        out.write(bytes(range(256)) + b"\n" + escapes)
        for _ in range(LONG_LINE_BYTES // len(block)):
            out.write(block)
        out.write(b"\n")


STRIKES: Mapping[str, Callable[[], object]] = {
    "kill": lambda: signal.raise_signal(signal.SIGKILL),
    "segv": lambda: signal.raise_signal(signal.SIGSEGV),
    "abort": os.abort,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit0": lambda: os._exit(0),
    "exit7": lambda: os._exit(7),
    "raise": lambda: _raise(RuntimeError("this rank failed (injected)")),
    "config": lambda: _raise(ConfigError("train.injected: wrong setting (injected)")),
    "oom_host": lambda: _raise(MemoryError("cannot allocate memory (injected)")),
    "oom_device": _run_out_of_device_memory,
    "hang_sleep": _sleep_forever,
    "hang_gil": _hold_the_interpreter,
    "flood": _flood,
    "garbage": _print_garbage,
}
