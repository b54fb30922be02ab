"""Changes product lines, one at a time, and asks the tests that run them: python scripts/mutants.py --count 300

Which tests run which lines is recorded once by `--record`: the whole suite under coverage, in twice its time.
Lines are drawn by the seed from all lines of the packages that can be changed in a meaningful way (a comparison, a
number, a condition, an operator, a name in quotes, a returned value, a call). A mutant that no test notices survives.
Those that cannot change what the program does stand in equivalent_mutants.yaml, with the reason, and do not count.
Record after a green `make test`: a test that fails by itself would look as if it noticed something.
"""

from __future__ import annotations

import argparse
import ast
import codecs
import contextlib
import itertools
import json
import multiprocessing
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
from typing import NoReturn

import pytest
import yaml
from tests_of_lines import ROOT, product_files, record, recorded

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
LIMIT_S = 300.0  # for these; no failure until then counts as survival
TEST_LIMIT_S = 60.0  # a test that hangs has noticed
OPEN = 100  # exit code of tests that neither pass nor fail
MAYBE_OPEN = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
SMALL = 8  # a number up to this grows by one, a larger one becomes 0
SLOW_IMPORTS = ["pytest", "numpy", "torch", "torch.distributed.fsdp", "paramiko", "typer", "rich", "jinja2"]
FORKSERVER = multiprocessing.get_context("forkserver")

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
               "not in": "in", "in": "not in"}  # fmt: skip
EDGES = ("<", "<=", ">", ">=")
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
            tells_time = _tells_time(left) or _tells_time(right)  # nobody sees the very moment of a limit
            table = {old: new for old, new in COMPARISONS.items() if not (tells_time and old in EDGES)}
            self.between(left, right, table)
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
        elif isinstance(node.value, int | float):  # one more of a limit changes nothing that anybody was promised
            self.replace(node, "({} + 1)" if abs(node.value) <= SMALL else "0")
        elif isinstance(node.value, str) and re.fullmatch(r"[\w.-]+", node.value) and not _is_codec(node.value):
            self.replace(node, repr(f"{node.value}_"))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
        if not names & {"TYPE_CHECKING", "__name__"}:  # imports of types; the end of a program, which no test traces
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

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: our own invariant, as an assertion
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Our own invariants: nothing depends on them."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id == "Literal"):  # types are mypy's
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        is_type = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "TypeVar"
        if not (is_type or "__all__" in names):
            self.generic_visit(node)

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


def _tells_time(node: ast.expr) -> bool:
    """Whether a clock is read here, or what it said is used."""
    words = {getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node)}
    return not words.isdisjoint({"monotonic", "now", "deadline"})


def _is_codec(name: str) -> bool:
    """Whether Python finds the same codec by this name and by the changed one."""
    with contextlib.suppress(LookupError):
        return codecs.lookup(name) == codecs.lookup(f"{name}_")
    return False


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
    for path in product_files():
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


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "failed" (a test did, or could not be imported), "survived", "late" (no end), "unseen"
    (no test runs anything of its file), "open" (no test failed, yet they do not pass: too slow, or gone since they were
    recorded), which says nothing."""

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
    """Run the line's tests on the changed copy; it is as before afterwards."""
    tests, begin = recorded().tests_of(mutant.path, mutant.line), time.monotonic()
    target = copy / mutant.path
    original = target.read_bytes()
    target.write_bytes(original[: mutant.begin] + mutant.text.encode() + original[mutant.end :])
    try:
        how = "unseen" if not tests else run(tests, copy)
    finally:
        target.write_bytes(original)
    return Outcome(mutant, how, time.monotonic() - begin)


def run(tests: list[str], copy: Path) -> str:
    """What these tests say of a copy: survived, failed, open or late."""
    of_copy = [test.replace(str(ROOT), str(copy)) for test in tests]  # some are named by where they lie
    process = FORKSERVER.Process(target=_run_tests, args=(str(copy), of_copy))
    process.start()
    process.join(LIMIT_S)
    try:
        if not process.is_alive():
            return {0: "survived", OPEN: "open"}.get(process.exitcode or 0, "failed")
        os.kill(process.pid or 0, signal.SIGINT)  # fixtures end what they began
        process.join(20)
        return "late"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def check_unchanged(mutants: Sequence[Mutant], copy: Path) -> None:
    """Ends the program when tests of some mutants do not pass without any change."""
    tests = list(
        dict.fromkeys(test for mutant in mutants for test in recorded().tests_of(mutant.path, mutant.line)[:3])
    )
    if run(tests, copy) != "survived":
        sys.exit(
            f"mutants: tests fail without a change, so they would tell nothing:\n{_log_of(copy).read_text()[-4000:]}"
        )


def _log_of(copy: Path) -> Path:
    return copy.with_suffix(".log")


class Reports:
    """Whether anything failed in a session of pytest, if one began."""

    def __init__(self) -> None:
        self.began = self.failed = False

    def pytest_sessionstart(self) -> None:
        self.began = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed


def _run_tests(copy: str, tests: list[str]) -> NoReturn:
    """In a fork of a process that has what is slow to import: the tests of one copy."""
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, copy)
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=copy)
    os.environ.pop("CI", None)
    log = os.open(_log_of(Path(copy)), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    reports = Reports()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S), *tests], [reports])
    sys.exit(OPEN if code in MAYBE_OPEN and reports.began and not reports.failed else code)


def package_of(path: str) -> str:
    """The package a rate is told for: engine/attention, cluster/image, burst_cli."""
    parts = Path(path).parent.parts
    return "/".join(parts[:2])


def show(outcomes: Sequence[Outcome]) -> None:
    """Survivors by package, then the rates, which leave out those of which nothing was decided."""
    for outcome in sorted((o for o in outcomes if not o.caught), key=lambda o: (o.mutant.path, o.mutant.line)):
        print(f"{outcome.how:8} {outcome.mutant}")
    print()
    for depth, of in ((2, package_of), (1, lambda path: path.split("/")[0])):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for outcome in outcomes:
            counts[of(outcome.mutant.path)][outcome.how] += 1
        for name, count in sorted(counts.items()):
            decided = count.total() - count["open"]
            share = f"{100 * count['failed'] / decided:5.1f}%" if decided else "     –"
            rest = f"  {count['open']} not decided" if count["open"] else ""
            print(f"{name:24} {count['failed']:4} of {decided:4} caught  {share}{rest}")
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
    parser.add_argument("--record", action="store_true", help="record which tests run which lines, change nothing")
    parser.add_argument("--list", action="store_true", help="show the mutants and their tests, run nothing")
    options = parser.parse_args()
    if options.record:
        record()
        return 0
    mutants = draw(options.count, options.seed, options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant}\n    {' '.join(recorded().tests_of(mutant.path, mutant.line))}")
        return 0
    outcomes: list[Outcome] = []
    recorded()
    FORKSERVER.set_forkserver_preload(SLOW_IMPORTS)
    with copies(options.jobs) as free, ThreadPoolExecutor(options.jobs) as pool:
        copy = free.get()
        check_unchanged(mutants[:20], copy)
        free.put(copy)

        def judge_next(mutant: Mutant) -> None:
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

        list(pool.map(judge_next, mutants))
    show(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
