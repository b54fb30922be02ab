"""Refuse words that are no terms of the field in new names of functions, classes, arguments, attributes and modules.

    python scripts/lint_names.py [--prune]

Names that are older than this rule are listed in names_baseline.txt, a `FOLDER NAME` per line. The list only shrinks:
--prune removes names that no longer exist, and nothing adds any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).with_name("names_baseline.txt")
FOLDERS = ("engine", "cluster", "burst_cli")
# Words -> what to write instead. Names are compared word by word: `kept_rows` and `KeptRows` have `kept`.
WORDS = {
    "absent gap site offer fence parcel marks": "the field's noun: unavailable, target, resources, delimiter, message",
    "asked asking begun gone": "requested, recompute, started, removed",
    "circulation journey trip travels resting turn": "ring pass, route, moving, stationary, layer_pattern",
    "everybody nobody somebody said tell tells told": "all ranks, no process, message, reply, report, set",
    "heed meet meets settle settled settles": "handle, warm_up, resolve, select, wait_pending",
    "keep keeps kept held stay stays": "save, saved, resident, retained",
    "own lies place places": "local, is_in, index, location, step",
    "beat glance mute futile patient": "heartbeat, read_state, unreachable, non_retryable, allow_slow",
    "manner way piece pieces indifference": "options, action, shard, chunk, rectangle, tolerance",
    "rehearsal rehearse rehearsed rehearses": "fake run, dry run",
    "forget forgets dress spread": "remove, format, expand",
}
WHOLE = {"found": "the noun found", "one": "item", "home": "owner"}  # refused as whole names: `home_path` is clear
ALLOWED = ("keep_last", "keep_every", "in_place", "round_trip")  # settings and terms of the field
INSTEAD = {word: instead for words, instead in WORDS.items() for word in words.split()}


def names_of(path: Path) -> Iterator[str]:
    """Yield the names that a module defines, its own included, without local variables."""
    yield path.stem
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.ClassDef | ast.Module):  # fields and constants
            targets = (target for item in node.body if isinstance(item, ast.Assign) for target in item.targets)
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            yield from (target.id for target in (*targets, *fields) if isinstance(target, ast.Name))


def advice(name: str) -> str | None:
    """Return what to write instead of a word in `name`, or None if the name is clear."""
    plain = re.sub("|".join(ALLOWED), "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_"))
    return WHOLE.get(plain) or next((INSTEAD[word] for word in plain.split("_") if word in INSTEAD), None)


def main(prune: bool) -> int:
    """Print every new name that has such a word, and every line of the baseline that is out of date."""
    known = set(BASELINE.read_text(encoding="utf-8").split("\n")) - {""}
    files = [(folder, path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    where = {f"{folder} {name}": path for folder, path in files for name in names_of(path)}
    found = {entry: instead for entry in where if (instead := advice(entry.split()[1])) is not None}
    if prune:
        BASELINE.write_text("".join(f"{entry}\n" for entry in sorted(known & found.keys())), encoding="utf-8")
        return 0
    for entry in sorted(found.keys() - known):
        print(f"{where[entry].relative_to(ROOT)}: name {entry.split()[1]!r}; write instead: {found[entry]}")
    for entry in sorted(known - found.keys()):
        print(f"{BASELINE.name}: no name {entry!r} any more; run python scripts/lint_names.py --prune")
    return 1 if found.keys() ^ known else 0


if __name__ == "__main__":
    sys.exit(main("--prune" in sys.argv[1:]))
