"""A pytest plugin: what a test needs of the machine. Where that is missing the test is skipped; one last line says so.

@pytest.mark.needs("ssh", "root")    on a test, or pytestmark of a file
require("sshd", "root")              in a fixture or a rig that all tests of it go through

A need is a command of `packages.txt`, another command, or one of `ABILITIES`. Where CI is set no test may be skipped
but for want of a GPU (skip_rule.py).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from testkit import KIT

_PREFIX = "needs "


def read_packages() -> dict[str, str]:
    """Command -> the Debian package that brings it."""
    lines = (line.partition("#")[0].split() for line in (KIT / "packages.txt").read_text().splitlines())
    return dict(words for words in lines if words)  # type: ignore[misc]


def _has_gpu() -> bool:
    import torch  # takes seconds; most tests do not need it

    return torch.cuda.is_available()


def _can_isolate() -> bool:
    """Whether this process may make namespaces and mount in them: root of many containers may not."""
    return _runs("unshare", "--mount", "--net", "mount", "-t", "tmpfs", "none", "/mnt")


def _can_map_users() -> bool:
    """Whether any user may make a network namespace: not in a chroot, and where the kernel forbids it."""
    return _runs("unshare", "--map-root-user", "--net", "true")


def _runs(*words: str) -> bool:
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True).returncode == 0


# What no package brings, in the words of the closing line.
ABILITIES: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "root": ("root", lambda: os.geteuid() == 0),
    "namespaces": ("namespaces (in a container: --privileged)", _can_isolate),
    "user namespaces": ("user namespaces", _can_map_users),
    "gpu": ("a CUDA device", _has_gpu),
}


@functools.cache
def is_missing(need: str) -> bool:
    """Whether the machine lacks it; found out once."""
    return not ABILITIES[need][1]() if need in ABILITIES else shutil.which(need) is None


def require(*needs: str) -> None:
    """Skip the test, or all that use the fixture, unless the machine has all of this."""
    if reason := _reason(needs):
        pytest.skip(reason)


def _reason(needs: Iterable[str]) -> str:
    """Why a test with these needs is skipped; "" where the machine has all of them."""
    missing = [need for need in needs if is_missing(need)]
    return _PREFIX + ", ".join(missing) if missing else ""


def missing_packages() -> set[str]:
    """The packages of packages.txt that bring a command which the machine lacks."""
    return {package for command, package in read_packages().items() if is_missing(command)}


def closing_line(reasons: Iterable[str], lacking: Iterable[str]) -> str:
    """One sentence about the tests that were skipped for these reasons; "" when no need was the reason.

    Where a package is missing, all those that the machine is `lacking` are named: a test that is skipped for one does
    not reach what it would need next, such as Slurm after sshd.
    """
    wanting = [reason.removeprefix(_PREFIX).split(", ") for reason in reasons if reason.startswith(_PREFIX)]
    needs = {need for missing in wanting for need in missing}
    packages = read_packages()
    parts = [words for need, (words, _) in ABILITIES.items() if need in needs]
    missing = {packages.get(need, need) for need in needs - set(ABILITIES)}
    if missing & set(packages.values()):
        missing |= set(lacking)
    if missing:
        parts.append(f"packages (apt-get install {' '.join(sorted(missing))})")
    tests = "1 test was skipped: it needs" if len(wanting) == 1 else f"{len(wanting)} tests were skipped: they need"
    return f"{tests} {', '.join(parts)}" if parts else ""


class ClosingLine:
    """Collects why tests were skipped, and says it below everything else."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons.append(report.longrepr[2].removeprefix("Skipped: "))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal and (line := closing_line(self._reasons, missing_packages())):
            terminal.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): commands, or `root`, `namespaces`; else the test is skipped")
    if not hasattr(config, "workerinput"):  # workers report to the session that started them
        config.pluginmanager.register(ClosingLine(), "closing_line_of_needs")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    gpu = ["gpu"] if item.get_closest_marker("gpu") else []
    if reason := _reason([*gpu, *(need for mark in item.iter_markers("needs") for need in mark.args)]):
        item.add_marker(pytest.mark.skip(reason=reason))  # before pytest looks: it reports the place of the test
