"""A pytest plugin: names tests over ten seconds and files over thirty that are not marked `thorough`, and, where CI
is set, fails the session over those that take three times as long.

Where several workers run tests, the largest files come first: these take long, so that the end is of short ones, and
they are of all parts, so that tests that compute run beside tests that wait.

Machines that others share may be several times slower for hours. How much slower is measured during the session, by a
small piece of work and by the time that the machine was kept waiting (`steal` of /proc/stat), and widens the limits.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from testkit import in_ci

TEST_S = 10.0
FILE_S = 30.0
REFERENCE_S = 1.9e-3  # of the piece of work, on the machine that the limits are meant for: AMD EPYC, 2 cores, 2026
LOOK_EVERY_S = 5.0
FAILS_AT = 3.0  # times the limit: who shares a machine is slowed down in ways that are not all measured
_WORK = range(100_000)


class Pace:
    """Seconds of every test and file, and how slow the machine was meanwhile."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        self._looks: list[float] = []
        self._looked_at = 0.0
        self._stolen = _stolen_and_all()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not {"thorough", "gpu"} & set(report.keywords):
            self.tests[report.nodeid] += report.duration  # type: ignore[assignment]
            self.files[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._looks.append(_work_s())
            self._looked_at = time.monotonic()

    def slowness(self) -> float:
        """How many times slower than the reference this machine was, at least 1."""
        stolen, total = (now - then for now, then in zip(_stolen_and_all(), self._stolen, strict=True))
        share = min(stolen / total, 0.9) if total else 0.0
        return max(1.0, statistics.median(self._looks or [0.0]) / REFERENCE_S) / (1.0 - share)

    def too_slow(self, times: float = 1.0) -> list[str]:
        """A line for every test and file over so many times its limit."""
        slowness = times * self.slowness()
        return [
            f"{what}: {seconds:.1f} s of {limit * slowness:.0f} s"
            for counted, limit in ((self.tests, TEST_S), (self.files, FILE_S))
            for what, seconds in counted.most_common()
            if seconds > limit * slowness
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if in_ci() and session.exitstatus == pytest.ExitCode.OK and self.too_slow(FAILS_AT):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        slowest = [f"{what} {seconds:.1f} s" for c in (self.tests, self.files) for what, seconds in c.most_common(1)]
        terminalreporter.line(
            f"pace: slowest {', '.join(slowest)}; machine {self.slowness():.2f} times slower than meant"
        )
        if lines := self.too_slow():
            terminalreporter.section("too slow: make these faster, or mark them thorough", red=True)
            for line in lines:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Pace(), "pace_of_tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        size = {path: path.stat().st_size for path in {item.path for item in items}}
        items.sort(key=lambda item: (-size[item.path], item.path))


def _work_s() -> float:
    """The best of three: what other programs do in between does not count, how fast the core is does."""

    def once() -> float:
        begin = time.perf_counter()
        sum(_WORK)
        return time.perf_counter() - begin

    return min(once() for _ in range(3))


def _stolen_and_all() -> tuple[float, float]:
    """Ticks in which the machine had work and its host made it wait, and these with those in which it worked."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        float, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return steal, user + nice + system + irq + softirq + steal
