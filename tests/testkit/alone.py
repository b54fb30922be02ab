"""A pytest plugin: where several workers run tests, one marked `alone` runs while no other test does.

Two locks on files that the workers of a session share: `floor` is held shared by every test and exclusively by one that
is alone; `gate` is passed on the way to it, so that nobody overtakes who waits for the floor to be empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of everything that measures time or limits it
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    locks = Path(tempfile.gettempdir()) / f"burst-tests-{worker['testrunuid']}"
    with turn(locks, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextlib.contextmanager
def turn(locks: Path, *, alone: bool) -> Iterator[None]:
    """Holds the floor with others, or alone; `locks` names the two files."""
    with Path(f"{locks}.gate").open("w") as gate, Path(f"{locks}.floor").open("w") as floor:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        for kind in ("gate", "floor"):
            (Path(tempfile.gettempdir()) / f"burst-tests-{worker['testrunuid']}.{kind}").unlink(missing_ok=True)
