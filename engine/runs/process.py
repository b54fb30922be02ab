"""Small facts and settings of operating-system processes. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

# torch up to 2.8 reads the second name only, newer ones both.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def process_start(pid: int) -> str | None:
    """When process `pid` started, in a form that tells a reused pid apart; None when no such process lives."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may itself hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else fields[19]


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signal_number` when its parent dies.

    torchrun leaves its ranks behind when it is killed, and a killed launcher would leave torchrun behind.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)


def prefer_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Lets torch, which is imported later, grow device memory in place, so that a freed block of the wrong size is no
    loss; whoever has set the allocator up already keeps that.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def redirect_output(path: Path) -> None:
    """Send standard output and error of this process and its children to `path` (appended), on the descriptor level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
