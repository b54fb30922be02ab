"""A program for nodes as one command and one text for its stdin: nothing is installed there, and nothing stays."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.access.connection import Connection
from cluster.code.node.boot import OLD_PYTHON, boot_code, pack_modules, with_length
from cluster.errors import ClusterError
from cluster.remote_text import one_line

_ROOT = Path(__file__).resolve().parent.parent.parent
_ANSWER_BYTES = 8 << 20


class NoAnswerError(ClusterError):
    """A program on a node did not answer; `is_python_missing` when there was nothing to run it."""

    def __init__(self, text: str, *, is_python_missing: bool = False) -> None:
        super().__init__(text)
        self.is_python_missing = is_python_missing


def ask_program(
    connection: Connection,
    modules: tuple[str, ...],
    question: Mapping[str, Any],
    *,
    data: bytes = b"",
    timeout_s: float,
) -> dict[str, Any]:
    """The answer of the last of `modules`, run on the node with the others, to `question` with `data` behind it.

    Raises SshError when the connection fails, NoAnswerError when the program does.
    """
    fence = f"burst-{secrets.token_hex(16)}"
    asked = json.dumps({**question, "fence": fence, "bytes": len(data)}).encode("ascii")
    text = with_length(pack_modules(modules, str(_ROOT))) + with_length(asked) + data
    command = ("python3", "-I", "-c", boot_code(modules[-1]), "burst-ask")
    result = connection.run(command, stdin=text, timeout_s=timeout_s, max_output_bytes=_ANSWER_BYTES)
    parts = result.stdout.split(f"\n{fence}\n".encode("ascii"))
    if len(parts) == 3:
        try:
            found = json.loads(parts[1])
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
    if result.exit_code == 127:
        raise NoAnswerError("no python3 there", is_python_missing=True)
    said = one_line(result.stderr[-2000:], 300)
    code = "was killed" if result.exit_code is None else f"ended with {result.exit_code}"
    raise NoAnswerError(
        f"python3 there {code} without an answer{f': {said}' if said else ''}", is_python_missing=OLD_PYTHON in said
    )
