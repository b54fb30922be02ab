"""Supervisors for tests: real daemons of this machine on made-up nodes, and nothing of them left afterwards.

python -m testkit.supervise_rig PROC PATIENCE_S < spec.json    one that looks at the memory of another machine, and is
    so patient with an outcome that it cannot write; "": as patient as any
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster.agent import supervisor
from cluster.agent.folder import NodeFiles, beat, make_folder, read_status, request_stop
from cluster.agent.memory import MemoryWatch
from cluster.agent.messages import parse_spec
from cluster.agent.start import start, sweep
from testkit import KIT, PYTHON_PATH
from testkit.fake_plan import fake_torchrun
from testkit.process_table import run_processes
from testkit.waiting import wait_for

# How a rank ended is to be had only until the parent asks for it: this one takes its time.
UNHURRIED = {"PYTHONPATH": PYTHON_PATH, "FAKE_POLL_S": "2"}
_numbers = itertools.count()


def new_run_id() -> str:
    """A run id that no other test process uses."""
    return f"20250101-000000-{os.getpid():x}-{next(_numbers)}"


class Rig:
    """One run on nodes that are folders below `folder`."""

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        self.run_id = run_id or new_run_id()
        self.folder = folder / self.run_id
        self._specs: dict[str, dict[str, Any]] = {}

    def spec(self, mode: str = "wait", *, node: str = "alpha", **changes: Any) -> dict[str, Any]:
        """The spec of two fake ranks in `mode` on node `node`."""
        spec = {
            "run_id": self.run_id,
            "node": self.name(node),
            "node_rank": 0,
            "num_nodes": 1,
            "first_rank": 0,
            "local_ranks": 2,
            "folder": str(self.folder / node),
            "argv": list(fake_torchrun(2, mode)),
            "cwd": str(KIT),
            "environment": {"PYTHONPATH": PYTHON_PATH},
            "lease_s": None,
            "stop_grace_s": 3.0,
            **changes,
        }
        self._specs[node] = spec
        return spec

    def start(self, mode: str = "wait", *, ranks: int = 2, **changes: Any) -> int:
        """The pid of a supervisor whose ranks are all there (`ranks` of them)."""
        spec = self.spec(mode, **changes)
        answer = start(spec)
        assert "started" in answer, answer
        node = changes.get("node", "alpha")
        if ranks:
            wait_for(lambda: self._are_there(node, ranks), "the ranks")
        return int(answer["started"])

    def name(self, node: str = "alpha") -> str:
        """The node's name, of this run alone: locks are of the machine."""
        return f"{node}-{self.run_id}"

    def files(self, node: str = "alpha") -> NodeFiles:
        return NodeFiles(str(self.folder / node), self.name(node))

    def status(self, node: str = "alpha") -> dict[str, Any]:
        return read_status(str(self.folder / node), self.name(node))

    def ranks(self, node: str = "alpha") -> dict[str, int]:
        """Rank -> pid, as the supervisor says."""
        return dict(self.status(node)["supervisor"].get("ranks", {}))

    def command(self) -> int:
        """The pid of what the supervisor started."""
        return int(psutil.Process(self.status()["supervisor"]["pid"]).children()[0].pid)

    def outcome(self, node: str = "alpha") -> dict[str, Any]:
        """The outcome, once there is one."""
        return dict(wait_for(lambda: self.status(node)["outcome"], "an outcome"))

    def _are_there(self, node: str, ranks: int) -> bool:
        """Whether that many ranks are; until then the lease must not end, however long they take."""
        self.beat(node)
        return len(self.ranks(node)) == ranks and len(self.said(node)) == ranks

    def beat(self, node: str = "alpha") -> None:
        beat(str(self.folder / node), self.name(node))

    def stop(self, grace_s: float, cause: str = "Ctrl-C", node: str = "alpha") -> None:
        """Ask for the end."""
        request_stop(str(self.folder / node), self.name(node), cause, grace_s)

    def processes(self, node: str = "alpha") -> list[psutil.Process]:
        """All living processes that carry the marks of the run and the node."""
        return run_processes(self.run_id, f"BURST_NODE={self.name(node)}")

    def sweep(self, run_id: str | None = None, node: str = "alpha") -> list[int]:
        """What would not die of this run, or of another one."""
        return sweep(str(self.folder / node), self.name(node), run_id or self.run_id, self._specs.get(node))

    def close(self) -> None:
        """Sweep every node."""
        for node in self._specs:
            assert self.sweep(node=node) == []

    def said(self, node: str = "alpha") -> list[str]:
        """What the ranks said, by their numbers."""
        return [path.read_text() for path in sorted(Path(self.files(node).log_dir).glob("rank*.log"))]


def names_of(processes: Sequence[psutil.Process]) -> list[str]:
    """Their names, without those that ended meanwhile."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            names.append(process.name())
    return names


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def main(proc: str, patience_s: str) -> None:
    spec = parse_spec(json.load(sys.stdin))
    files = NodeFiles(spec.folder, spec.node)
    for folder in (files.state_dir, files.log_dir):
        make_folder(folder)
    if patience_s:
        supervisor._PATIENCE_S = float(patience_s)
    made = supervisor.Supervisor(spec, MemoryWatch(proc))
    made.tell()
    made.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
