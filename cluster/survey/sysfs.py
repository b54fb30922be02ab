"""Questions about a node's files that Python answers there, as one JSON value; and file systems, told in this way."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.survey.section import Question

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


def program_question(name: str, limit_s: int, program: str) -> Question:
    """A whole program, ended by a line end, prints the answer."""
    return Question(
        name, limit_s, f"command -v python3 >/dev/null || exit 127\npython3 -I -S - <<'PYTHON'\n{program}PYTHON\n"
    )
