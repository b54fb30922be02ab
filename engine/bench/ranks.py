"""Starts one process per rank and waits for all of them; kills the rest on an error. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.spec import RESULT_FILE, RankSetup, write_cell
from engine.config.errors import ConfigError, RunError
from engine.runs.process import die_with_parent
from engine.runs.record import python_path

_POLL_S = 0.05
# Peers of a failed rank fail a moment later; their errors are consequences.
_FAILURE_GRACE_S = 2.0
_TAIL_LINES = 15


@dataclass(frozen=True)
class RankProgram:
    """The program of every rank: `python -m MODULE FOLDER`, started by `command`.

    In `command` {rank}, {node} and {local_rank} are replaced, e.g. ("ip", "netns", "exec", "bench{rank}"); empty: the
    processes are children on this machine as it is.
    """

    module: str
    command: tuple[str, ...] = ()

    def argv(self, rank: int, setup: RankSetup, folder: Path) -> list[str]:
        """Return the command of one rank."""
        places = {"rank": rank, "node": rank // setup.local_ranks, "local_rank": rank % setup.local_ranks}
        try:
            prefix = [word.format(**places) for word in self.command]
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"--rank-command: got {' '.join(self.command)!r}; legal in braces: rank, node, local_rank ({error!r})"
            ) from error
        return [*prefix, sys.executable, "-m", self.module, str(folder)]


def measure_cell(cell: Any, program: RankProgram) -> dict[str, Any]:
    """Run the ranks of the cell's `setup` and return the result that rank 0 wrote.

    Raises RunError with the failed rank and the end of its log. All ranks have exited on return, even after Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as name:
        folder = Path(name)
        write_cell(cell, folder)
        run_ranks(program, cell.setup, folder)
        result: dict[str, Any] = json.loads((folder / RESULT_FILE).read_text())
        return result


def run_ranks(program: RankProgram, setup: RankSetup, folder: Path) -> None:
    """Run the program on all ranks until all succeed; on a failure kill the rest and raise RunError."""
    commands = [program.argv(rank, setup, folder) for rank in range(setup.ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            processes.append(_start(command, rank_environment(rank, setup), log_path(folder, rank)))
        _wait(processes, commands, folder)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def rank_environment(rank: int, setup: RankSetup) -> dict[str, str]:
    """Return this process's environment with the variables of a rank: rank, threads and code."""
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(setup.ranks),
        "LOCAL_RANK": str(rank % setup.local_ranks),
        "LOCAL_WORLD_SIZE": str(setup.local_ranks),
        "OMP_NUM_THREADS": str(setup.threads),
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves Python stacks in the log
    }


def log_path(folder: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return folder / f"rank{rank:04d}.log"


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then kills the ranks
                # Safe here: no other thread runs, and the function only makes one system call.
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise RunError(f"bench: {command[0]} cannot be started: {error.strerror or error}") from error


def _wait(processes: Sequence[subprocess.Popen[bytes]], commands: Sequence[Sequence[str]], folder: Path) -> None:
    failed: int | None = None
    deadline = 0.0
    while True:
        codes = [process.poll() for process in processes]
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            deadline = time.monotonic() + _FAILURE_GRACE_S
        if None not in codes or (failed is not None and time.monotonic() > deadline):
            break
        time.sleep(_POLL_S)
    if failed is not None:
        raise RunError(_failure_text(failed, codes, commands[failed], folder))


def _failure_text(rank: int, codes: Sequence[int | None], command: Sequence[str], folder: Path) -> str:
    others = [str(other) for other, code in enumerate(codes) if code and other != rank]
    tail = log_path(folder, rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    after = f"; ranks {', '.join(others)} failed after it" if others else ""
    lines = [f"bench: rank {rank} failed first, exit code {codes[rank]}{after}. Its last words:"]
    lines += [f"    {line}" for line in tail]
    return "\n".join([*lines, f"Its command: {' '.join(command)}"])
