from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.processes import kill_run, run_processes
from engine.runs import RUN_ID_VARIABLE

RUN_ID = f"test-{os.getpid()}"
SLEEP = "import time; time.sleep(300)"


@pytest.fixture
def family(tmp_path: Path) -> Iterator[list[int]]:
    """A parent and its child in another session; pids of both."""
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, RUN_ID_VARIABLE: RUN_ID})
    while not note.exists() or not note.read_text():
        time.sleep(0.01)
    yield [parent.pid, int(note.read_text())]
    kill_run(RUN_ID)
    parent.wait()


def test_processes_are_found_by_run_id_in_any_session(family: list[int]) -> None:
    assert sorted(process.pid for process in run_processes(RUN_ID)) == sorted(family)


def test_orphans_are_still_found(family: list[int]) -> None:
    psutil.Process(family[0]).kill()
    deadline = time.monotonic() + 5.0
    while [p.pid for p in run_processes(RUN_ID)] != family[1:] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [process.pid for process in run_processes(RUN_ID)] == family[1:]


def test_kill_run_ends_all_of_them_and_nothing_else(family: list[int]) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, RUN_ID_VARIABLE: RUN_ID + "x"})
    try:
        assert kill_run(RUN_ID) == []
        assert run_processes(RUN_ID) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_descendants_are_found_without_the_mark() -> None:
    environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env=environment)
    try:
        assert [found.pid for found in run_processes("no such run", process.pid)] == [process.pid]
    finally:
        process.kill()
        process.wait()


def test_this_process_is_never_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getpid() not in [process.pid for process in run_processes("x", os.getpid())]
