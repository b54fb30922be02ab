"""The probe as text to send, and its answer as sections.

What the frame protects against. Output of tools holds words of strangers: kernel log lines, names of processes, of
files, of network interfaces. They cannot know the fence, 128 random bits that live in one shell variable for one probe,
so nothing that they print begins or ends a section. On top of that an answer is believed only where its frame is exact:
a section that begins twice, ends without beginning, or is open when another begins counts as CUT_OFF, so that lines put
in between make a section unknown, never good.

What no frame can protect against: root on the node runs the probe and may invent the whole answer. It can lie about its
own node, and about nothing else: each node has its own connection, fence and answer.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cluster.remote_text import clean_text
from cluster.survey.section import Question, Section, SectionState

SECTION_BYTES = 1 << 20
MAX_SECTIONS = 500
_TIMED_OUT_CODES = (124, 137, 143)  # of timeout(1): its own, ended by KILL, ended by TERM (busybox)
_MARK = re.compile(rb"(begin|end) ([a-z0-9_.-]{1,64})(?: (\d{1,3}))??(?: (\d{1,12}\.\d{1,6}|-))?")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_HEAD = r"""
# The head of every probe. $fence is set before it: a word that no output can guess. It is never exported and never an
# argument of a process, so that only this shell knows it.
# BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in what is read: a rehearsal node has a tree of its own.
LC_ALL=C
export LC_ALL
root=${BURST_PROBE_ROOT:-}
export root
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin
export PATH

if timeout -k 1 9 true </dev/null >/dev/null 2>&1; then
    # What ignores TERM is killed. A process stuck in the kernel (state D) cannot be, and timeout waits for it for ever:
    # the outer one then kills the waiting one, and the probe goes on.
    limited() { timeout -s KILL $(($1 + 5)) timeout -k 2 "$1" sh -s; }
elif timeout -s KILL 9 true </dev/null >/dev/null 2>&1; then
    limited() { timeout -s KILL "$1" sh -s; } # of older busybox
else
    limited() { sh -s; } # the asking side gives up on the whole answer
fi

# Seconds since boot, or a dash: without starting a process, and without trust in the clock.
since_boot() { read -r now rest 2>/dev/null </proc/uptime || now=-; }

# section NAME SECONDS AFTER <<'END' ... END    runs the lines below in a shell of their own, with a time limit.
late=
section() {
    case " $late " in *" $3 "*) return 0 ;; esac
    since_boot
    printf '\n%s begin %s %s\n' "$fence" "$1" "$now"
    limited "$2" 2>&1
    code=$?
    since_boot
    case $code in 124 | 137 | 143) late="$late $1" ;; esac
    printf '\n%s end %s %s %s\n' "$fence" "$1" "$code" "$now"
}
"""


def new_fence() -> str:
    """A word that begins every line which cuts the answer; nothing a node prints can contain it by chance or intent."""
    return f"@@{secrets.token_hex(16)}"


def build_script(
    questions: Iterable[Question], fence: str, settings: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """The script for `sh -s`: exported `settings`, the head, every question once, and a last line: nothing more comes.

    Raises ValueError for a setting that is no name of a variable, or whose value holds NUL.
    """
    for name, value in settings.items():
        if _VARIABLE.fullmatch(name) is None or "\0" in value:
            raise ValueError(f"not a variable of a shell: {name!r}")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    asked = {question.name: question for question in questions}.values()
    sections = [f"section {one.name} {one.limit_s} {one.after or '-'} <<'END'\n{one.script}\nEND" for one in asked]
    tail = "printf '\\n%s done\\n' \"$fence\"\n"
    return "\n".join([f"fence='{fence}'", *exports, _HEAD, *sections, tail]).encode()


def is_complete(answer: bytes | bytearray, fence: str) -> bool:
    """Whether the script's last line has been answered; a process left behind may hold the stream open for ever."""
    return answer[-2 * len(fence) :].rstrip().endswith(f"\n{fence} done".encode())


def read_sections(answer: bytes, fence: str) -> Mapping[str, Section]:
    """The sections of an answer, by name. One whose frame is not exact is CUT_OFF, and so is one that is too long."""
    reader = _Reader(answer)
    word = re.escape(fence).encode()
    for line in re.finditer(rb"^" + word + rb"(?: ([^\n]*))?$", answer, re.MULTILINE):
        if not reader.take(line.group(1) or b"", line.start(), line.end()):
            break
    return reader.finish()


class _Reader:
    """Follows the frame line by line. `_open` is (name, where its output begins, when it began)."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._sections: dict[str, Section] = {}
        self._open: tuple[str, int, float | None] | None = None

    def take(self, mark: bytes, start: int, end: int) -> bool:
        """Act on the frame line that lies at [start, end); whether to go on."""
        found = _MARK.fullmatch(mark)
        if found is None:
            self._break_open(start)
            return True
        kind, name, code, time = found.group(1), found.group(2).decode(), found.group(3), _seconds(found.group(4))
        if kind == b"begin" and code is None:
            self._break_open(start)
            if name in self._sections:
                self._sections[name] = Section(name, state=SectionState.CUT_OFF)
            else:
                self._open = (name, end + 1, time)
        elif kind == b"end" and code is not None and self._open is not None and self._open[0] == name:
            self._close(start, int(code), time)
        else:
            self._break_open(start)
            self._sections[name] = Section(name, state=SectionState.CUT_OFF)
        return len(self._sections) < MAX_SECTIONS - 1

    def finish(self) -> Mapping[str, Section]:
        """All sections; one that is still open was cut off."""
        self._break_open(len(self._answer))
        return self._sections

    def _break_open(self, position: int) -> None:
        if self._open is None:
            return
        name, begin, _ = self._open
        self._open = None
        self._sections[name] = Section(name, self._text(begin, position), None, SectionState.CUT_OFF)

    def _close(self, position: int, code: int, ended: float | None) -> None:
        assert self._open is not None
        name, begin, began = self._open
        if position - begin > SECTION_BYTES:
            self._break_open(position)
            return
        self._open = None
        elapsed = round(max(0.0, ended - began), 3) if ended is not None and began is not None else 0.0
        late = code in _TIMED_OUT_CODES
        state = SectionState.TIMED_OUT if late else SectionState.ENDED
        self._sections[name] = Section(name, self._text(begin, position), None if late else code, state, elapsed)

    def _text(self, begin: int, end: int) -> str:
        return clean_text(self._answer[begin : min(end, begin + SECTION_BYTES)]).strip("\n")


def _seconds(word: bytes | None) -> float | None:
    return None if word is None or word == b"-" else float(word)
