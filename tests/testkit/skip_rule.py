"""A pytest plugin: where CI is set in the environment, a skip of a test that is not marked `gpu` fails the session.

What must run there has run, or it is red. See needs.py for what skips tests elsewhere.
"""

from __future__ import annotations

import pytest

from testkit import in_ci


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
    if in_ci():
        config.pluginmanager.register(SkipRule(), "skip_rule_of_ci")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
