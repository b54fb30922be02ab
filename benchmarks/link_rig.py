"""Runs behind real links whose ranks write logs: on a node, and in a launcher of their own that copies them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from testkit.process_table import living
from testkit.supervise_rig import PYTHON_PATH, new_run_id

from cluster.agent.messages import Spec
from cluster.control.ssh_link import LinkTiming, NodeTask, SshLink
from cluster.ssh.hosts import Host
from cluster.ssh.session import SshPool
from cluster.testbed.build import open_testbed
from cluster.testbed.testbed import Testbed

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
        there = testbed.node(node).home / ".burst" / "runs" / run_id
        return cls(replace(testbed.host(node), connect_timeout_s=3.0), run, there)

    @property
    def node(self) -> str:
        return self.host.name

    def link(self, pool: SshPool) -> SshLink:
        return SshLink(self.host, pool.connect, NodeTask(self.run, self.node, str(self.there), lead=True), PATIENT)

    def chatty(self, ranks: int, lines: int, per_second: float) -> Spec:
        """Ranks that only write logs."""
        words = (str(ranks), str(lines), str(per_second))
        return Spec(
            run_id=self.run.name,
            node=self.node,
            node_rank=0,
            num_nodes=1,
            first_rank=0,
            local_ranks=ranks,
            folder=str(self.there),
            argv=(sys.executable, "-S", str(Path(__file__).with_name("log_writer.py")), *words),
            cwd="/",
            environment={"PYTHONPATH": PYTHON_PATH, "BURST_RANK_LOGS": f"{self.there}/logs/{self.node}"},
            files=(("config.yaml", "exp: test\n"), ("run.json", "{}\n")),
            stop_grace_s=3.0,
        )

    def log(self, rank: int = 0) -> Path:
        """The copy of a rank's log."""
        return self.run / "logs" / self.node / f"rank{rank:04}.log"


def agents_on(testbed: Testbed, node: str) -> list[psutil.Process]:
    """The agents that run on a node."""
    namespace = Path(f"net:[{testbed.node(node).namespace.stat().st_ino}]")
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
