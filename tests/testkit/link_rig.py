"""Runs behind real links for tests: a spec for a command on a node, what both sides hold, a launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.agent.messages import Spec
from cluster.control.link import NodeLink
from cluster.control.ssh_link import LinkTiming, NodePlace, SshLink
from cluster.ssh.hosts import Host
from cluster.ssh.pool import SshPool
from cluster.testbed.build import Testbed, open_testbed
from testkit.process_table import living
from testkit.supervise_rig import PYTHON_PATH, new_run_id
from testkit.waiting import WAIT_S, wait_for

PATIENT = LinkTiming(first_pause_s=0.2, longest_pause_s=0.5, silence_s=3.0, start_s=120.0)


@dataclass(frozen=True)
class RemoteRun:
    """One run on one node: its folder there (on this machine, too: nodes of a testbed share the disk) and its copy."""

    host: Host
    run: Path
    there: Path

    @classmethod
    def on(cls, testbed: Testbed, node: str, base: Path, run_id: str | None = None) -> RemoteRun:
        """One on a node of a testbed, new unless its id is given."""
        run_id = run_id or new_run_id()
        run = base / run_id
        run.mkdir(mode=0o700, exist_ok=True)
        there = testbed.node(node).folder.home / ".burst" / "runs" / run_id
        return cls(testbed.host(node, 3.0), run, there)

    @property
    def node(self) -> str:
        return self.host.name

    def link(self, pool: SshPool) -> SshLink:
        return SshLink(self.host, pool, NodePlace(self.run, self.node, str(self.there), lead=True), PATIENT)

    def spec(self, *argv: str, **changes: Any) -> Spec:
        """`argv` as the whole of this node's part."""
        logs = self.there / "logs" / self.node
        values: dict[str, Any] = {
            "run_id": self.run.name,
            "node": self.node,
            "node_rank": 0,
            "num_nodes": 1,
            "first_rank": 0,
            "local_ranks": 2,
            "folder": str(self.there),
            "argv": argv,
            "cwd": "/",
            "environment": {"PYTHONPATH": PYTHON_PATH, "BURST_RANK_LOGS": str(logs)},
            "files": (("config.yaml", "exp: test\n"), ("run.json", "{}\n")),
            "lease_s": 60.0,
            "stop_grace_s": 3.0,
        }
        return Spec(**{**values, **changes})

    def log(self, rank: int = 0) -> Path:
        """The copy of a rank's log."""
        return self.run / "logs" / self.node / f"rank{rank:04}.log"

    def check_logs(self, files: int) -> int:
        """The bytes of all ranks' logs, each the same on both sides."""
        total = 0
        for rank in range(files):
            here = self.log(rank).read_bytes()
            assert here == (self.there / "logs" / self.node / self.log(rank).name).read_bytes()
            total += len(here)
        return total


def begin(link: NodeLink, spec: Spec, timeout_s: float = WAIT_S) -> None:
    """Return once what `spec` says has begun. Raises StartRefusedError."""
    link.start(spec)
    status = wait_for(lambda: (seen := link.poll()) and (seen.is_begun or seen.refusal) and seen, "start", timeout_s)
    if status.refusal is not None:
        raise status.refusal


def swept(link: NodeLink, timeout_s: float = WAIT_S) -> tuple[int, ...]:
    """What is left once the node is swept."""
    link.sweep()
    return tuple(wait_for(lambda: (seen := link.poll()).swept is not None and (seen.swept,), "sweep", timeout_s)[0])


def agents_on(testbed: Testbed, node: str) -> list[psutil.Process]:
    """The agents that run on a node."""
    namespace = Path(f"/proc/{testbed.node(node).holder()}/ns/net").readlink()
    return [one for one in living("cmdline", "burst-agent") if _namespace(one) == namespace]


def _namespace(process: psutil.Process) -> Path | None:
    with contextlib.suppress(OSError):  # one that just ended
        return Path(f"/proc/{process.pid}/ns/net").readlink()
    return None


def start_launcher(testbed: Testbed, runs: Sequence[RemoteRun]) -> subprocess.Popen[bytes]:
    """A process of its own that copies `runs` until it is killed."""
    places = [f"{run.run}={run.node}" for run in runs]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    return subprocess.Popen([sys.executable, __file__, testbed.name, *places], env=environment)


def main(name: str, *places: str) -> None:
    """The launcher: follows, renews the leases, waits to be killed."""
    testbed = open_testbed(name)
    with SshPool() as pool:
        links = []
        for place in places:
            run, _, node = place.rpartition("=")
            links.append(RemoteRun.on(testbed, node, Path(run).parent, Path(run).name).link(pool))
        for link in links:
            link.follow()
        while True:
            for link in links:
                link.beat()
            time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
