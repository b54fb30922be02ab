"""What faulthandler wrote of a rank's threads, read back: who is in a collective, and where the others are. Pure.

The text comes from another machine and may be cut anywhere; what cannot be read is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.remote_text import one_line

MAX_TEXT = 1_000_000
_HEADER = re.compile(r"(Current thread|Thread) 0x([0-9a-fA-F]+)\b[^()]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.+)')
# Files of torch whose functions block until other ranks come, and files that only lead there.
_BLOCKING_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BLOCKING_FUNCTIONS = {
    ("engine/attention/transport.py", "wait"): "a message of the attention",
    ("engine/attention/streams.py", "wait"): "a message of the attention",
    ("torch/distributed/rendezvous.py", "_create_c10d_store"): "the rendezvous",
    ("torch/distributed/rendezvous.py", "_env_rendezvous_handler"): "the rendezvous",
}
_LEADING_FILES = (
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_tools/",
    "engine/parallel/waits.py",
    "/contextlib.py",
)
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return one_line(f"{self.function} ({short_path(self.file)}:{self.line if self.line is not None else '?'})")


@dataclass(frozen=True)
class ThreadStack:
    """One thread, the frame that runs first."""

    ident: int
    is_current: bool
    frames: tuple[Frame, ...]

    @property
    def blocking_call(self) -> str | None:
        """Wherein this thread waits for other ranks, as a function of torch or in words, or None."""
        for frame in self.frames:
            if any(part in frame.file for part in _LEADING_FILES):
                continue
            if frame.file.endswith(_BLOCKING_FILES):
                return frame.function
            names = _BLOCKING_FUNCTIONS.items()
            return next(
                (text for (file, name), text in names if frame.file.endswith(file) and frame.function == name), None
            )
        return None


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """The threads of the last dump in `text`, in its order; a file has one dump per request."""
    threads: list[tuple[int, bool, list[Frame]]] = []
    previous_was_frame = False
    for line in text[-MAX_TEXT:].splitlines():
        header, frame = _HEADER.match(line), _FRAME.match(line)
        if line.startswith("# rank "):
            threads = []  # another process writes from here on
        elif header is not None:
            ident = int(header[2], 16)
            if previous_was_frame or any(ident == known for known, _, _ in threads):
                threads = []  # within a dump there is an empty line before every thread but the first
            threads.append((ident, header[1] == "Current thread", []))
        elif frame is not None and threads:
            number = int(frame[2]) if frame[2].isdigit() and len(frame[2]) < 9 else None
            threads[-1][2].append(Frame(frame[1], number, frame[3]))
        previous_was_frame = frame is not None
    return tuple(ThreadStack(ident, current, tuple(frames)) for ident, current, frames in threads)


def main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The thread that runs the program: it began in a module; else the one that took the signal."""
    for thread in threads:
        if thread.frames and (thread.frames[-1].file.startswith("<frozen runpy") or _began_in_module(thread)):
            return thread
    current = next((thread for thread in threads if thread.is_current), None)
    return current or next(reversed(threads), None)


def waits_in(threads: Sequence[ThreadStack]) -> str | None:
    """Wherein the rank waits for others, or None. On a GPU backward runs in a thread of its own."""
    main = main_thread(threads)
    if main is None:
        return None
    if main.frames and main.frames[0].file.endswith(_BACKWARD[0]) and main.frames[0].function == _BACKWARD[1]:
        calls = (thread.blocking_call for thread in threads if thread is not main)
        return next((call for call in calls if call is not None), None)
    return main.blocking_call


def short_path(path: str) -> str:
    """The last parts of a path, from the package on where one is known."""
    for package in ("/torch/", "/engine/", "/burst_cli/", "/cluster/"):
        head, found, tail = path.rpartition(package)
        if found and head:
            return f"{package[1:]}{tail}"
    return "/".join(path.split("/")[-3:])


def _began_in_module(thread: ThreadStack) -> bool:
    return thread.frames[-1].function == "<module>"
