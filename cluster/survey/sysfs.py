"""Questions about /sys and /proc that Python answers on the node, as one JSON value."""

from __future__ import annotations

from cluster.survey.section import Question

_HEAD = r"""
import json, os, pathlib, time

root = pathlib.Path(os.environ["root"] or "/")


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
"""


def python_question(name: str, limit_s: int, program: str) -> Question:
    """`program` prints the answer; it has `root`, below which all files lie, `lines`, `tell` and `place` of a path."""
    script = f"command -v python3 >/dev/null || exit 127\npython3 -I - <<'PYTHON'\n{_HEAD}{program}PYTHON\n"
    return Question(name, limit_s, script)
