"""Asks one node, or this machine, everything in one go; memory and time are bounded whatever comes back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection, RemoteProcess
from cluster.ssh.hosts import is_host_name
from cluster.survey.script import build_script, is_complete, new_fence, read_sections
from cluster.survey.section import NodeProbe, Question

ANSWER_BYTES = 4 << 20
DEFAULT_TIMEOUT_S = 60.0
_CLOCK_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_CLOCK = re.compile(rb"\s*(\d{1,11})(\.\d{1,9})?")
_END_WAIT_S = 2.0


def survey_node(
    connection: Connection,
    questions: Iterable[Question],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> NodeProbe:
    """The answer of a node to `questions` in about `timeout_s`. settings: variables that their scripts read.

    Raises SshError while nothing has been asked yet; after that, whatever came until the node fell silent, broke off or
    sent too much is the answer, `trouble` says so, and what is missing in it is CUT_OFF or MISSING.
    """
    deadline = time.monotonic() + timeout_s
    offset_s, error_s = _read_clock(connection, min(timeout_s, _CLOCK_TIMEOUT_S))
    fence = new_fence()
    script = build_script(questions, fence, settings)
    process = connection.start(["sh", "-s"])
    try:
        answer, trouble = _converse(process, script, fence, deadline, timeout_s)
    finally:
        process.close()
    return NodeProbe(connection.host.name, read_sections(answer, fence), offset_s, error_s, trouble)


def survey_here(
    questions: Iterable[Question],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> NodeProbe:
    """The answer of this machine to `questions`, named after it."""
    name = socket.gethostname()
    fence = new_fence()
    trouble = ""
    # Files, not pipes: what hangs in the kernel may hold a pipe open for ever. A session of its own, so that all of it
    # can be ended; what runs under `timeout` ends by its own limit.
    with tempfile.TemporaryFile() as script, tempfile.TemporaryFile() as output:
        script.write(build_script(questions, fence, settings))
        script.seek(0)
        command = ["sh", "-s"]
        with subprocess.Popen(command, stdin=script, stdout=output, stderr=output, start_new_session=True) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                trouble = _late(timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        answer = output.read(ANSWER_BYTES)
    if not trouble and not is_complete(answer, fence):
        trouble = f"the shell ended with exit code {process.returncode} before the answer was complete"
    return NodeProbe(name if is_host_name(name) else "localhost", read_sections(answer, fence), trouble=trouble)


def _read_clock(connection: Connection, timeout_s: float) -> tuple[float | None, float]:
    """(offset, by how much that may be wrong) by a command that does next to nothing.

    busybox tells whole seconds only.
    """
    sent_at, begin = time.time(), time.monotonic()
    result = connection.run(["date", "+%s.%N"], timeout_s=timeout_s)
    round_trip = time.monotonic() - begin
    found = _CLOCK.match(result.stdout) if result.exit_code == 0 else None
    if found is None:
        return None, 0.0
    fraction = found.group(2)
    # Whole seconds are cut, not rounded: the middle of that second is the best guess.
    told = float(found.group(1)) + (float(fraction) if fraction else 0.5)
    error = round_trip / 2 + (0.0 if fraction else 0.5)
    return told - (sent_at + round_trip / 2), error


def _converse(
    process: RemoteProcess, script: bytes, fence: str, deadline: float, timeout_s: float
) -> tuple[bytes, str]:
    """(what the script printed, what is wrong with it in words)."""
    process.feed(script)
    answer = bytearray()
    while not is_complete(answer, fence):
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(answer), _late(timeout_s)
        try:
            data = process.read(_READ_BYTES, left)
        except SshError as error:
            late = error.kind is SshFailure.COMMAND_TIMEOUT
            return bytes(answer), _late(timeout_s) if late else error.detail
        if not data:
            return bytes(answer), _why_ended(process, bytes(answer), fence)
        answer += data
        if len(answer) > ANSWER_BYTES:
            return bytes(answer[:ANSWER_BYTES]), f"the answer is longer than {ANSWER_BYTES >> 20} MiB; the rest is lost"
    return bytes(answer), ""


def _late(timeout_s: float) -> str:
    return f"the answer was not complete within {timeout_s:.3g} s"


def _why_ended(process: RemoteProcess, answer: bytes, fence: str) -> str:
    """Why the answer is at its end without being complete."""
    try:
        result = process.wait(_END_WAIT_S)
    except SshError as error:
        return f"the answer broke off: {error.detail}"
    said = one_line(result.stderr) or ("" if fence.encode() in answer else one_line(answer))
    code = "a signal" if result.exit_code is None else f"exit code {result.exit_code}"
    return f"the shell of the node ended with {code} before the answer was complete{f': {said}' if said else ''}"
