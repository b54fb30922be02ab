"""Commands as every log-in shell runs them, and their output as it was printed, whatever that shell prints beside it.

sshd hands a command line to the log-in shell of the user, which may be csh, tcsh or fish, and which may run start-up
files or a forced command that print something. So the command line is always COMMAND_LINE, and the words of the
command follow on stdin in one line. The shell on the node encloses each stream of the command in a mark:

    what start-up files print   MARK\\n   the output, byte for byte   MARK EXIT_CODE\\n   what is printed after it
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence

# Means the same to sh, csh, tcsh and fish: no line break, no backslash, no exclamation mark. `read` takes no byte
# beyond the end of the line, so what follows on stdin is the command's. Words on stdin are in no list of processes.
COMMAND_LINE = """sh -c 'IFS= read -r line; eval "$(printf %b "$line")"'"""
NOISE_BYTES = 1 << 20  # of start-up files; more is no answer any more
_SHOWN_BYTES = 4 << 10
_CODE = re.compile(rb" (\d{1,3})\n")
_MAX_CODE_BYTES = 5
_SIGNALS = range(129, 193)  # exit codes by which a shell reports that signal 1 to 64 ended a command


def new_mark() -> str:
    """A word that no output can contain by chance or intent: the command does not get to know it."""
    return f"@@{secrets.token_hex(16)}"


def encode_command(argv: Sequence[str], mark: str) -> bytes:
    """The line for the stdin of COMMAND_LINE that runs `argv` between its marks, quoted word by word."""
    begin, end = f"printf '%s\\n' {mark}", f"printf '%s %s\\n' {mark} $code"
    script = f"{begin}; {begin} >&2; {shlex.join(argv)}; code=$?; {end}; {end} >&2; exit $code"
    encoded = script.replace("\\", "\\\\").replace("\n", "\\n")
    return encoded.encode("utf-8", errors="surrogateescape") + b"\n"


class MarkedStream:
    """One output stream of a command, fed as it comes.

    has_started: the first mark came. is_over: the second one did, and `exit_code` is what it says; None: a signal ended
    the command. noise_bytes: what came before the first mark; `noise` is its end.
    """

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark.encode("ascii"), b""
        self.has_started, self.is_over = False, False
        self.exit_code: int | None = None
        self.noise, self.noise_bytes = b"", 0

    def feed(self, data: bytes) -> bytes:
        """The output of the command in `data`, and in what was held back before."""
        self._held += data
        if not self.has_started:
            self._skip_noise()
        if not self.has_started or self.is_over:
            return b""
        at = self._held.find(self._mark)
        if at < 0:
            return self._release(len(self._held) - self._start_mark_bytes())
        found = _CODE.match(self._held, at + len(self._mark))
        if found is None:
            # The line is not complete yet; one that is too long was not written by the shell.
            is_short = len(self._held) - at - len(self._mark) < _MAX_CODE_BYTES
            return self._release(at if is_short else at + len(self._mark))
        self.is_over, code = True, int(found[1])
        self.exit_code = None if code in _SIGNALS else code
        return self._release(at)

    def rest(self) -> bytes:
        """At the end of a stream that broke off: what was held back because a mark might have begun there."""
        return self._release(len(self._held)) if self.has_started and not self.is_over else b""

    def _skip_noise(self) -> None:
        at = self._held.find(self._mark + b"\n")
        self.has_started = at >= 0
        size = at if self.has_started else len(self._held) - self._start_mark_bytes()
        self.noise_bytes += size
        self.noise = (self.noise + self._release(size))[-_SHOWN_BYTES:]
        if self.has_started:
            self._held = self._held[len(self._mark) + 1 :]

    def _start_mark_bytes(self) -> int:
        """How many bytes at the end of what is held may be the beginning of a mark with its line end."""
        mark = self._mark + b"\n"
        return next((size for size in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:size])), 0)

    def _release(self, size: int) -> bytes:
        released, self._held = self._held[:size], self._held[size:]
        return released
