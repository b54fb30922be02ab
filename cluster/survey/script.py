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
from dataclasses import replace
from types import MappingProxyType

from cluster.remote_text import clean_text
from cluster.survey.section import Question, Section, SectionState

SECTION_BYTES = 1 << 20
_TIMED_OUT_CODES = (124, 137, 143)  # of timeout(1): its own, ended by KILL, ended by TERM (busybox)
_MARK = re.compile(rb"(begin|end) ([a-z0-9_.-]{1,64})(?: (\d{1,3}))?")
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

# What ignores TERM is killed. A process stuck in the kernel (state D) cannot be, and timeout waits for it for ever: the
# outer one then kills the waiting one, and the probe goes on.
limited() { timeout -s KILL $(($1 + 5)) timeout -k 2 "$1" sh -s; }

# section NAME SECONDS AFTER <<'END' ... END    runs the lines below in a shell of their own, with a time limit.
late=
section() {
    case " $late " in *" $3 "*) return 0 ;; esac
    printf '\n%s begin %s\n' "$fence" "$1"
    limited "$2" 2>&1
    code=$?
    case $code in 124 | 137 | 143) late="$late $1" ;; esac
    printf '\n%s end %s %s\n' "$fence" "$1" "$code"
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
    lines = [*re.finditer(rb"^" + fence.encode() + rb"(?: ([^\n]*))?$", answer, re.MULTILINE)]
    marks = [_MARK.fullmatch(line[1] or b"") for line in lines]
    ends = [*(line.start() for line in lines[1:]), len(answer)]
    sections: dict[str, Section] = {}
    for line, end, before, mark, after in zip(lines, ends, [None, *marks], marks, [*marks[1:], None], strict=False):
        if mark is None:
            continue
        name = mark[2].decode()
        if mark[1] == b"begin" and mark[3] is None and name not in sections:
            sections[name] = _section(name, answer[line.end() + 1 : end], after if _closes(mark, after) else None)
        elif not _closes(before, mark):
            sections[name] = Section(name, state=SectionState.CUT_OFF)
    return sections


def _closes(begin: re.Match[bytes] | None, end: re.Match[bytes] | None) -> bool:
    if begin is None or end is None or begin[2] != end[2]:
        return False
    return (begin[1], end[1]) == (b"begin", b"end") and begin[3] is None and end[3] is not None


def _section(name: str, text: bytes, end: re.Match[bytes] | None) -> Section:
    section = Section(name, clean_text(text[:SECTION_BYTES]).strip("\n"), state=SectionState.CUT_OFF)
    if end is None or len(text) > SECTION_BYTES:
        return section
    if int(end[3]) in _TIMED_OUT_CODES:
        return replace(section, state=SectionState.TIMED_OUT)
    return replace(section, state=SectionState.ENDED, exit_code=int(end[3]))
