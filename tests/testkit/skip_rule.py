"""A pytest plugin: tests marked `gpu` skip themselves without a CUDA device, and they alone may be skipped.

Where CI is set in the environment, any other skip fails the session: what must run there has run, or it is red.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

NO_GPU = "needs a CUDA device: torch.cuda.is_available() is False"


class SkipRule:
    """Notes skipped tests that are not marked `gpu`, and fails the session for them."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
            self.forbidden.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.forbidden.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.forbidden:
            terminalreporter.section("skipped, but they must run where CI is set", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        config.pluginmanager.register(SkipRule(), "skip_rule_of_ci")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
