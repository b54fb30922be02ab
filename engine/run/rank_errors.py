"""What ended a rank, as plain JSON: class of failure, type, message, traceback, exit code. Standard library only."""

from __future__ import annotations

import time
import traceback
from typing import Any

from engine.errors import BurstError
from engine.memory.oom import is_out_of_memory, measure_out_of_memory
from engine.run.records import utc_now

MESSAGE_CHARACTERS = 4_000
TRACEBACK_CHARACTERS = 20_000
# What a rank says when it only noticed that another one had gone.
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "ConnectionError", "ConnectionResetError", "BrokenPipeError")
_ECHO_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def describe_error(error: BaseException) -> dict[str, Any]:
    """{kind, type, message, traceback, exit_code, time_ns, at, memory}; kind: config, user, oom, peer_lost, exception.

    `memory` is what `OutOfMemory` says under kind oom, else None.
    """
    measured = measure_out_of_memory(error)
    text = str(error)[:MESSAGE_CHARACTERS]
    lines = "".join(traceback.format_exception(error))
    return {
        "kind": _kind(error, text),
        "type": _type_name(error),
        "message": text,
        "traceback": lines[-TRACEBACK_CHARACTERS:],
        "exit_code": error.exit_code if isinstance(error, BurstError) else 1,
        "time_ns": time.time_ns(),
        "at": utc_now(),
        "memory": None if measured is None else measured.to_dict(),
    }


def _kind(error: BaseException, text: str) -> str:
    name = type(error).__name__
    if is_out_of_memory(error):  # first: an error of ours may have been raised from it
        return "oom"
    if isinstance(error, BurstError):
        return "config" if error.exit_code == 2 else "user"
    if name in _ECHO_TYPES or any(s in text for s in _ECHO_TEXTS):
        return "peer_lost"
    return "exception"


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
