"""Questions to a node, its answers, and what it means that one is missing, late or cut off.

Questions about its files are programs that Python runs there, which print one JSON value.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cluster.remote_text import clean_value, one_line

T = TypeVar("T")
_NO_TOOL = "install what the question needs on the node: Python 3.9 or newer, or the tool that it is about"


class SectionState(enum.StrEnum):
    """How a section ended. Only ENDED has an exit code that means anything; nothing else may count as healthy."""

    ENDED = "ended"
    TIMED_OUT = "timed out"  # its own time limit stopped it
    CUT_OFF = "cut off"  # its end never came, or more came than is kept
    MISSING = "missing"  # the node did not answer it at all


@dataclass(frozen=True)
class Question:
    """One part of the probe: a script for POSIX shells (dash, busybox), and how many seconds it may take.

    A file that it reads lies below $root. after: it is not asked when that other one came to the end of its time: what
    hangs once hangs again.
    """

    name: str
    limit_s: int
    script: str
    after: str = ""


@dataclass(frozen=True)
class Section:
    """Output (stdout and stderr, cleaned) of one part of the probe.

    exit_code: of the part's script; None unless state is ENDED. 127 says that the tool is not installed.
    """

    name: str
    output: str = ""
    exit_code: int | None = None
    state: SectionState = SectionState.MISSING

    @property
    def ok(self) -> bool:
        """Whether the part ran to its end with exit code 0: the only case in which its output may be believed."""
        return self.state is SectionState.ENDED and self.exit_code == 0

    @property
    def tool_missing(self) -> bool:
        """Whether the tool that this part needs is not installed."""
        return self.state is SectionState.ENDED and self.exit_code == 127

    def trouble(self) -> str:
        """Why the output cannot be believed, in words; empty when it can."""
        if self.state is not SectionState.ENDED:
            return f"{self.name}: {self.state.value}"
        return "" if self.exit_code == 0 else f"{self.name}: exit code {self.exit_code}"

    def document(self) -> Any:
        """The output as JSON, every text in it cleaned. Raises UnreadableError."""
        if not self.ok:
            # The last line is what a program that broke says of itself.
            last = one_line((self.output.strip().splitlines() or [""])[-1])
            raise UnreadableError(self.trouble(), last, _NO_TOOL if self.tool_missing else "")
        try:
            return clean_value(json.loads(self.output))
        except (ValueError, RecursionError):
            raise UnreadableError(f"{self.name}: no whole JSON", one_line(self.output)) from None

    def read(self, kind: Callable[[Any], T] | type[T]) -> T:
        """The JSON as a value of a dataclass, see `fill`, or what a function makes of it.

        Raises UnreadableError, also where it is not of the shape that is expected.
        """
        document = self.document()
        try:
            return fill(kind, document) if isinstance(kind, type) else kind(document)
        except UnreadableError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            text = f"{self.name}: not what was asked for: {one_line(str(error))}"
            raise UnreadableError(text, one_line(self.output)) from None


def fill(kind: Any, told: Any) -> Any:
    """A JSON value as one of that type: a dataclass of which it names every field, tuples, mappings by name, numbers,
    texts of one line, `X | None`. Raises ValueError, TypeError and LookupError."""
    origin, parts, hints = get_origin(kind), get_args(kind), _hints(kind)
    if hints:
        return kind(**{name: fill(part, told[name]) for name, part in hints.items()})
    if type(None) in parts:
        return None if told is None else fill(parts[0], told)
    if origin is tuple:
        kinds = parts if parts[-1] is not ... else parts[:1] * len(listed(told))
        return tuple(fill(part, one) for part, one in zip(kinds, listed(told), strict=True))
    if origin is Mapping:
        return {parts[0](one_line(name)): fill(parts[1], one) for name, one in told.items()}
    if isinstance(told, bool) is not (kind is bool) or not isinstance(told, (int, float) if kind is float else kind):
        raise ValueError(f"{one_line(repr(told), 60)} is no {kind.__name__}")
    return one_line(str(told), 2000) if kind is str else kind(told)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass; of other types nothing."""
    return get_type_hints(kind) if is_dataclass(kind) else {}


@dataclass(frozen=True)
class NodeProbe:
    """Everything one node answered.

    clock_offset_s: the node's clock minus ours, by the middle of the round trip; None when the node told no time.
    clock_error_s: by how much that may be wrong. trouble: why the answer as a whole is not complete, in words; empty
    when it is.
    """

    node: str
    sections: Mapping[str, Section] = field(default_factory=dict)
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    trouble: str = ""

    def section(self, name: str) -> Section:
        """The section of that name; one in state MISSING when the node did not answer it."""
        return self.sections.get(name, Section(name))


def listed(value: Any) -> list[Any]:
    """A JSON value that is a list. Raises ValueError: an empty object or text is no list without entries."""
    if not isinstance(value, list):
        raise ValueError("no list")
    return value


class UnreadableError(ValueError):
    """A section did not end well or does not read as it must.

    evidence: a line that it holds. remedy: what to do about it, where that is known.
    """

    def __init__(self, text: str, evidence: str = "", remedy: str = "") -> None:
        self.evidence, self.remedy = evidence, remedy
        super().__init__(text)


class NotApplicableError(Exception):
    """What was to be looked at is not on this node, which needs none; the text says so."""


_HEAD = r"""
import json, os, pathlib, re, sys, time

root = pathlib.Path(os.environ["root"] or "/")


def own(path):
    # A file of the machine: in the rehearsal tree where that has it.
    return root / path if (root / path).exists() else pathlib.Path("/", path)


def lines(path):
    # Nothing of what cannot be read: a file that is not there, an unused entry, an error of the kernel's.
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def tell(path):
    return lines(path)[0].strip() if lines(path) else ""


def place(path):
    # Where a link leads, seen from the node's own root.
    return "/" + os.path.relpath(os.path.realpath(path), os.path.realpath(root)) if path.exists() else ""


def mounts(path):
    # Device, place, kind, options, ... of every mount; the kernel writes blanks in names as \\040.
    plain = lambda word: re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
    return [[plain(word) for word in line.split()] for line in lines(path)]


def mount(folder):
    # Device, place and kind of the file system that holds a folder.
    found = {words[1]: words[:3] for words in mounts(pathlib.Path("/proc/self/mounts"))}
    real = pathlib.Path(folder).resolve()
    return next((found[str(one)] for one in (real, *real.parents) if str(one) in found), ["?", "?", "?"])


def room(folder):
    found = os.statvfs(os.path.join(folder, "."))
    told = {"size": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}
    return dict(told, inodes=found.f_files, inodes_free=found.f_ffree, kind=mount(folder)[2])
"""


@dataclass(frozen=True)
class Filesystem:
    """Room of the file system that holds a folder, in bytes. inodes: 0 where they are made as needed (btrfs, some NFS).

    Raises ValueError where there is no size.
    """

    size: int
    free: int
    inodes: int
    inodes_free: int
    kind: str

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ValueError("a file system without a size")


def python_question(name: str, limit_s: int, program: str) -> Question:
    """`program` prints the answer; it has `root`, below which all files lie, and the functions above."""
    return program_question(name, limit_s, _HEAD + program)


# The head of the probe sets $python3 where another Python than python3 is to answer.
_RUN = 'python=${python3:-python3}\ncommand -v "$python" >/dev/null || exit 127\n"$python" -I -S - <<\'PYTHON\'\n'

# What burst itself runs on a node, questions and the agent, needs Python 3.9: python3, or that of the configuration.
FIND_PYTHON = r"""
find_python() {
    for python in python3 "$1"; do
        case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
        if "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then return 0; fi
    done
    return 1
}
"""


def program_question(name: str, limit_s: int, program: str) -> Question:
    """A whole program, ended by a line end, prints the answer."""
    return Question(name, limit_s, f"{_RUN}{program}PYTHON\n")
