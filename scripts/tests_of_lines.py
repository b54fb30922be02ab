"""Which tests run which lines of the product: recorded by running the suite under coverage, then asked for lines."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("burst_cli", "cluster", "engine")
RECORD = ROOT / ".mutants"
TESTS_S = 25.0  # of tests for one line, by their recorded times
MAX_TESTS = 150


def product_files() -> list[str]:
    """Paths of all modules, relative to the checkout."""
    return sorted(str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def record() -> None:
    """Run the suite and note in .mutants/ which lines each test runs, in processes that it starts too."""
    shutil.rmtree(RECORD, ignore_errors=True)
    RECORD.mkdir()
    words = ["--cov", "--cov-context=test", "--cov-report=", f"--junitxml={RECORD / 'junit.xml'}", "-q"]
    # Processes that tests start read the settings anew, wherever they work: the context is the test that started them.
    own = {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "BURST_RECORD": str(RECORD)}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", "-m", "not thorough and not gpu", *words],
        cwd=ROOT,
        env={**os.environ, **own},
        check=False,  # a test that fails, or is slow beside the tracer, still tells its lines
    )
    for name in product_files():
        (RECORD / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, RECORD / "sources" / name)


@dataclass(frozen=True)
class Lines:
    """Which tests run which lines, as recorded: of each test its seconds and how many lines of the product it runs."""

    database: Path
    seconds: dict[str, float]
    extent: dict[str, int]

    def tests_of(self, path: str, line: int) -> list[str]:
        """Tests that run a line, those first that do least else, then their neighbours (which may share a fixture or a
        process), until TESTS_S of work are found. Where no test is known to (lines that are run by an import, or by
        processes that cannot be traced), those of the file, first where a word of the line occurs."""
        direct, of_file = self._tests(path, self._recorded_line(path, line))
        tests = direct or {test for test, lines in of_file.items() if lines > 0.05 * max(of_file.values())}
        files = set(map(_file_of, tests))
        neighbours = [test for test in self.seconds if _file_of(test) in files and test not in tests]
        words = set() if direct else _words((ROOT / path).read_text().splitlines()[line - 1])
        strange = {test: not words & _words(_text(_file_of(test))) for test in tests} if words else {}
        tests_in_order = sorted(
            tests, key=lambda test: (strange.get(test, False), self.extent[test] / of_file[test], test)
        )
        chosen: list[str] = []
        total = 0.0
        for test in (*tests_in_order, *sorted(neighbours, key=self.seconds.__getitem__)):
            seconds = self.seconds.get(test, math.inf)
            if total + seconds <= TESTS_S and len(chosen) < MAX_TESTS:
                chosen.append(test)
                total += seconds
        return chosen

    def _recorded_line(self, path: str, line: int) -> int:
        """The line's number when the tests were recorded; 0 if it was not there."""
        old = (RECORD / "sources" / path).read_text().splitlines() if (RECORD / "sources" / path).exists() else []
        matcher = difflib.SequenceMatcher(None, old, (ROOT / path).read_text().splitlines(), autojunk=False)
        blocks = (b for b in matcher.get_matching_blocks() if b.b <= line - 1 < b.b + b.size)
        return next((line + block.a - block.b for block in blocks), 0)

    def _tests(self, path: str, line: int) -> tuple[set[str], Counter[str]]:
        """Tests that run this line, and how many lines of the file each test runs."""
        of_line, of_file = set[str](), Counter[str]()
        is_of_import = False
        for context, bits in _rows(self.database, path):
            numbers = numbits_to_nums(bits)
            if not (test := _test_of(context)):
                is_of_import |= line in numbers
                continue
            of_file[test] += len(numbers)
            if line in numbers:
                of_line.add(test)
        return set() if is_of_import else of_line, of_file


def _rows(database: Path, path: str = "%") -> Iterator[tuple[str, bytes]]:
    """(context, lines as coverage's bits) of one recorded file, or of all."""
    query = (
        "select context.context, line_bits.numbits from line_bits join context on context.id = line_bits.context_id"
        " join file on file.id = line_bits.file_id where file.path like ?"
    )
    with contextlib.closing(sqlite3.connect(database)) as connection:
        yield from connection.execute(query, (path,))


def _test_of(context: str) -> str:
    """The test in a context's name ("none|TEST|run" of the test's process, "TEST (call)" of one that it started), the
    last one where a process serves many; "" outside of tests."""
    last = context[max(context.rfind("tests/"), 0) :]
    return re.split(r" \((?:setup|call|teardown)\)|\|(?:setup|run|teardown)$", last)[0] if "::" in last else ""


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text() if (ROOT / file).is_file() else ""


@functools.cache
def _words(text: str) -> set[str]:
    """Names that begin a line, and what stands in quotes."""
    return set(re.findall(r"^\s*(\w+)\s*[:=]", text, re.MULTILINE)) | set(re.findall(r"[\"'](\w[\w.-]+)[\"']", text))


def _file_of(test: str) -> str:
    return test.partition("::")[0]


@functools.cache
def recorded() -> Lines:
    """What `record` noted."""
    if not (RECORD / "coverage").exists():
        sys.exit("mutants: it is not known which tests run which lines; run: python scripts/mutants.py --record")
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(RECORD / "junit.xml").iter("testcase"):
        file, name = case.attrib["classname"].replace(".", "/") + ".py", case.attrib["name"]
        if f"def {name.partition('[')[0]}(" in _text(file):  # else it is gone since
            seconds[f"{file}::{name}"] = float(case.attrib["time"])
    extent = Counter[str]()
    for context, bits in _rows(RECORD / "coverage"):
        if test := _test_of(context):
            extent[test] += sum(byte.bit_count() for byte in bits)
    return Lines(RECORD / "coverage", seconds, extent)
