"""Changes product lines, one at a time, and asks the nearest tests: python scripts/mutants.py --count 300 --seed 1

Lines are drawn by the seed from all lines of the packages that can be changed in a meaningful way (a comparison, a
number, a condition, an operator, a name in quotes, a returned value, a call). A mutant that no test notices survives.
Those that cannot change what the program does stand in equivalent_mutants.yaml, with the reason, and do not count.
Run it after a green `make test`: a test that fails by itself would look as if it noticed something.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("burst_cli", "cluster", "engine")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
MAX_FILES = 8  # of tests, for one mutant
LIMIT_S = 150.0  # for these; no failure until then counts as survival
TEST_LIMIT_S = 60.0  # a test that hangs has noticed

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
               "not in": "in", "in": "not in"}  # fmt: skip
OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}


@dataclass(frozen=True)
class Mutant:
    """One changed place of a file: bytes `begin` to `end` become `text`."""

    path: str
    line: int
    begin: int
    end: int
    text: str
    before: str  # the source that is replaced
    source_line: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.text}    in: {self.source_line}"


# --- what can be changed ----------------------------------------------------------------------------------------------


class Changes(ast.NodeVisitor):
    """Collects (begin, end, text) of every meaningful change of a source."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, int, str]] = []
        self.visit(ast.parse(source))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """First and last byte of a node."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def replace(self, node: ast.expr | ast.stmt, form: str) -> None:
        """The node becomes `form`, with {} for its source."""
        begin, end = self.span(node)
        self.found.append((begin, end, form.format(self.source[begin:end].decode())))

    def between(self, left: ast.expr, right: ast.expr, table: dict[str, str]) -> None:
        """The operator between two nodes becomes another."""
        begin, end = self.span(left)[1], self.span(right)[0]
        for old in sorted(table, key=len, reverse=True):
            spaced = rf"\b{old}\b".replace(" ", r"\s+") if old[0].isalpha() else re.escape(old)
            if match := re.search(spaced.encode(), self.source[begin:end]):
                self.found.append((begin + match.start(), begin + match.end(), table[old]))
                return

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.between(left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, {"and": "or"} if isinstance(node.op, ast.And) else {"or": "and"})
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(part, ast.Constant | ast.JoinedStr) and _is_text(part) for part in ast.walk(node)):
            self.between(node.left, node.right, OPERATORS)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            begin, end = self.span(node)
            self.found.append((begin, end, self.source[slice(*self.span(node.operand))].decode()))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.replace(node, "({} + 1)")
        elif isinstance(node.value, str) and re.fullmatch(r"[\w.-]+", node.value):
            self.replace(node, repr(f"{node.value}_"))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self.replace(node.test, "not ({})")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815 - names of ast.NodeVisitor

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.replace(node.value, "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "break")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.replace(node, "None")
            self.generic_visit(node)  # not into docstrings

    def visit_Raise(self, node: ast.Raise) -> None:
        """Texts of errors are checked elsewhere."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Our own invariants: nothing depends on them."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # not into the annotation
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # not decorators
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:  # neither decorators nor annotations
            self.visit(statement)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def mutants_of(path: str, source: str) -> dict[int, list[Mutant]]:
    """Every change of a file, by line."""
    found: dict[int, list[Mutant]] = defaultdict(list)
    changes, lines = Changes(source), source.splitlines()
    for begin, end, text in changes.found:
        line = changes.source[:begin].count(b"\n") + 1
        before = changes.source[begin:end].decode()
        found[line].append(Mutant(path, line, begin, end, text, before, lines[line - 1].strip()))
    return found


def is_python(mutant: Mutant) -> bool:
    """Whether the changed file is still Python, and another program."""
    source = (ROOT / mutant.path).read_bytes()
    changed = source[: mutant.begin] + mutant.text.encode() + source[mutant.end :]
    try:
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def draw(count: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """`count` mutants on different lines: lines drawn from all packages, then one change of each."""
    rng = random.Random(seed)
    lines: list[list[Mutant]] = []
    equivalent = {(row["path"], row["line"], row["before"], row["text"]) for row in _equivalents()}
    for path in sorted(str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        if not only or any(path.startswith(prefix) for prefix in only):
            lines += mutants_of(path, (ROOT / path).read_text()).values()
    rng.shuffle(lines)
    drawn: list[Mutant] = []
    for mutants in lines:
        rng.shuffle(mutants)
        told = (m for m in mutants if (m.path, m.source_line, m.before, m.text) not in equivalent and is_python(m))
        drawn += list(itertools.islice(told, 1))
        if len(drawn) == count:
            break
    return drawn


def _equivalents() -> list[dict[str, str]]:
    return list(yaml.safe_load(EQUIVALENT.read_text()) or []) if EQUIVALENT.exists() else []


# --- the nearest tests ------------------------------------------------------------------------------------------------


def _imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _graph() -> tuple[dict[str, set[str]], dict[Path, set[str]]]:
    """What modules import of each other, and what test files import, their own helpers' imports included."""
    product = {_module(p): _imports(p) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    files = {p: _imports(p) for p in (ROOT / "tests").rglob("*.py")}
    helpers = {p.stem: names for p, names in files.items() if not p.name.startswith("test_")}
    tests = {}
    for path, names in files.items():
        if path.name.startswith("test_"):
            used = {name.split(".")[-1] for name in names} | {name.split(".")[0] for name in names}
            tests[path] = names.union(*(helpers[name] for name in used & set(helpers)))
    return product, tests


@functools.cache
def nearest(path: str) -> list[str]:
    """Test files for a product file: those that import it, then its namesakes, its folder, its importers' tests."""
    product, tests = _graph()
    module = _module(ROOT / path)
    importers = {name for name, names in product.items() if module in names}
    words = set(re.split(r"[_/]", Path(path).stem)) - {"", "init"}

    def score(test: Path) -> float:
        of_file = tests[test]
        folder = set(test.relative_to(ROOT / "tests").parent.parts)
        same_folder = len(folder & set(Path(path).parent.parts)) / (len(folder) or 1)
        name = len(words & set(test.stem.split("_"))) / (len(words) or 1)
        return 4 * (module in of_file) + 3 * name + 2 * same_folder + (1.5 if importers & of_file else 0)

    ranked = sorted(tests, key=lambda test: (-score(test), str(test)))
    return [str(test.relative_to(ROOT)) for test in ranked if score(test) >= 1.5][:MAX_FILES]


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "failed" (a test did, or none could be collected), "survived", "late" (no end)."""

    mutant: Mutant
    how: str
    seconds: float

    @property
    def caught(self) -> bool:
        return self.how == "failed"


@contextlib.contextmanager
def copies(count: int) -> Iterator[Queue[Path]]:
    """So many copies of the tracked files; what the checkout has in .venv serves all of them."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        queue: Queue[Path] = Queue()
        for number in range(count):
            copy = Path(folder) / str(number)
            for name in filter(None, names.split("\0")):
                if (ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
            queue.put(copy)
        yield queue


def judge(mutant: Mutant, copy: Path) -> Outcome:
    """Run the nearest tests on the changed copy; it is as before afterwards."""
    target, begin = copy / mutant.path, time.monotonic()
    original = target.read_bytes()
    target.write_bytes(original[: mutant.begin] + mutant.text.encode() + original[mutant.end :])
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    environment.pop("CI", None)
    command = [sys.executable, *words, "-m", "not thorough and not gpu", *nearest(mutant.path)]
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        how = "survived" if process.wait(LIMIT_S) in (0, 5) else "failed"
    except subprocess.TimeoutExpired:
        how = "late"
        process.send_signal(signal.SIGINT)  # fixtures end what they began
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        target.write_bytes(original)
    return Outcome(mutant, how, time.monotonic() - begin)


def package_of(path: str) -> str:
    """The package a rate is told for: engine/attention, cluster/image, burst_cli."""
    parts = Path(path).parent.parts
    return "/".join(parts[:2])


def show(outcomes: Sequence[Outcome]) -> None:
    """Survivors by package, then the rates."""
    for outcome in sorted((o for o in outcomes if not o.caught), key=lambda o: (o.mutant.path, o.mutant.line)):
        print(f"{outcome.how:8} {outcome.mutant}")
    print()
    for depth, of in ((2, package_of), (1, lambda path: path.split("/")[0])):
        total, caught = Counter[str](), Counter[str]()
        for outcome in outcomes:
            total[of(outcome.mutant.path)] += 1
            caught[of(outcome.mutant.path)] += outcome.caught
        for name in sorted(total):
            print(f"{name:24} {caught[name]:4} of {total[name]:4} caught  {100 * caught[name] / total[name]:5.1f}%")
        if depth == 2:
            print()


def main() -> int:
    """Exit code 0 however many survive: the figures are for people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many lines (300)")
    parser.add_argument("--seed", type=int, default=1, help="which lines (1)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--only", nargs="*", default=[], help="prefixes of paths, such as engine/attention")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--list", action="store_true", help="show the mutants and their tests, run nothing")
    options = parser.parse_args()
    mutants = draw(options.count, options.seed, options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant}\n    {' '.join(nearest(mutant.path))}")
        return 0
    outcomes: list[Outcome] = []
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:

        def run(mutant: Mutant) -> None:
            copy = free.get()
            outcomes.append(judge(mutant, copy))
            free.put(copy)
            print(
                f"{len(outcomes):4} of {len(mutants)}  {outcomes[-1].how:8} {outcomes[-1].seconds:6.1f} s  {mutant}",
                flush=True,
            )
            if options.json:
                rows = [{**asdict(o.mutant), "how": o.how, "seconds": o.seconds} for o in list(outcomes)]
                options.json.write_text(json.dumps(rows, indent=1))

        list(pool.map(run, mutants))
    show(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
