"""Every text of an error that the tool can print, as it stands in the source: `{}` for what is filled in.

python scripts/error_texts.py            one per line: file, class, text
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("burst_cli", "cluster", "engine")
# Errors that people see, with the position of their text among the arguments.
TEXT_OF = {
    "ConfigError": 0,
    "HostsError": 0,
    "DataError": 0,
    "RunError": 0,
    "RunFolderError": 0,
    "CheckpointError": 0,
    "ClusterError": 0,
    "SshError": 2,
    "TestbedError": 0,
    "SweepError": 0,
    "SlurmError": 0,
    "CodeError": 0,
    "PlanFileError": 0,
    "EngineError": 0,
    "StartRefusedError": 2,
    "BurstError": 0,
    "Problem": 1,
    "ControllerBusyError": 0,
}


@dataclass(frozen=True)
class ErrorText:
    """One text: where it is raised, and what stays the same in it."""

    path: str
    line: int
    kind: str
    text: str

    @property
    def fixed(self) -> str:
        """The longest part that is always the same, by which a page can be searched for it."""
        return max(self.text.split("{}"), key=len).strip()


def error_texts(root: Path = ROOT) -> list[ErrorText]:
    """All texts that are spelled where the error is raised, in the order of files and lines."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [
                ErrorText(str(path.relative_to(root)), node.lineno, kind, text) for node, kind, text in _raised(tree)
            ]
    return found


def _raised(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        place = TEXT_OF.get(name)
        if place is None or len(node.args) <= place:
            continue
        for argument in _spelled(node.args[place]):
            text = " ".join(_template(argument).split())
            if len(text.replace("{}", "").strip()) >= 8:
                yield node, name, text


def _spelled(argument: ast.expr) -> list[ast.expr]:
    """The texts of a list of problems, or the one text."""
    return list(argument.elts) if isinstance(argument, ast.List | ast.Tuple) else [argument]


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.IfExp):
        return _template(node.body)
    return "{}"


if __name__ == "__main__":
    for one in error_texts():
        sys.stdout.write(f"{one.path}:{one.line}\t{one.kind}\t{one.text}\n")
