"""Logs of many ranks followed over SSH: what it costs the launcher and the nodes, how late lines are, what is lost.

A virtual cluster (`burst testbed`, so this needs root): on every node a supervisor whose ranks write numbered lines of
100 bytes, and one launcher, a process of its own, that mirrors them all. After the end every log is compared with the
node's. CPU is that of the launcher's process, and of what runs on the nodes for it: the agent, and the sshd that
carries it. All of them share the cores of this machine with the ranks that write.

    python -m benchmarks.bench_logs --output benchmarks/results/logs_HARDWARE_YYYYMM.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from engine.bench.measure import environment

if TYPE_CHECKING:
    from cluster.testbed.testbed import Testbed

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

LINE_BYTES = 100
LOOK_S = 0.5
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Case:
    """One measurement. lines: of every stream; per_second: how fast they are written, 0: as fast as it goes."""

    name: str
    nodes: int
    streams_per_node: int
    lines: int
    per_second: float

    @property
    def bytes(self) -> int:
        """All that is written."""
        return self.nodes * self.streams_per_node * self.lines * LINE_BYTES


@dataclass(frozen=True)
class Usage:
    """CPU share of one core while lines were written, and the most memory of the largest process."""

    cpu_share: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Figures:
    """What came of a case. late_s: age of the newest line that is here, all streams together, seen twice a second."""

    elapsed_s: float
    bytes_per_s: float
    is_identical: bool
    late_median_s: float | None
    late_max_s: float | None
    launcher: Usage
    agents: Usage
    sshd: Usage


def cases(seconds: int) -> tuple[Case, ...]:
    """What is measured."""
    return (
        Case("64 streams on 4 nodes, 300 lines/s each", 4, 16, 300 * seconds, 300.0),
        Case("64 streams on 1 node, 300 lines/s each", 1, 64, 300 * seconds, 300.0),
        Case("one stream as fast as it goes", 1, 1, 3_000_000, 0.0),
    )


class Counter:
    """CPU seconds and peak memory of some processes, as long as they live."""

    def __init__(self) -> None:
        self._cpu: dict[int, float] = {}
        self._peak = 0

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Take what they have used so far."""
        for process in processes:
            try:
                times = process.cpu_times()
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (psutil.Error, OSError):
                continue
            if "VmHWM:" in status:
                self._cpu[process.pid] = times.user + times.system
                self._peak = max(self._peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)

    def usage(self, elapsed_s: float) -> Usage:
        """What they used in that time."""
        return Usage(sum(self._cpu.values()) / elapsed_s, self._peak)


def measure(case: Case, testbed: Testbed, base: Path) -> Figures:
    """Run one case; nothing of it is left afterwards but its files in `base`."""
    from benchmarks.link_rig import RemoteRun, start_launcher
    from cluster.ssh.session import SshPool

    runs = [RemoteRun.on(testbed, node, base) for node in testbed.node_names[: case.nodes]]
    launcher = start_launcher(testbed, runs)
    with SshPool() as pool:
        try:
            begin = time.monotonic()
            for run in runs:
                link = run.link(pool)
                link.start(run.chatty(case.streams_per_node, case.lines, case.per_second))
                _until(lambda link=link: link.poll().has_started, 10.0)
                link.close()
            return _watch(case, testbed, runs, psutil.Process(launcher.pid), begin)
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait()
            for run in runs:
                link = run.link(pool)
                link.follow()
                link.sweep()
                _until(lambda link=link: link.poll().swept is not None, 30.0)
                link.close()


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when it holds, or after that time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _watch(case: Case, testbed: Testbed, runs: Sequence[Any], launcher: psutil.Process, begin: float) -> Figures:
    from benchmarks.link_rig import agents_on

    counters = {"launcher": Counter(), "agents": Counter(), "sshd": Counter()}
    late: list[float] = []
    deadline = time.monotonic() + PATIENCE_S + (case.lines / case.per_second if case.per_second else 0)
    agents: list[psutil.Process] = []
    here = 0
    while here < case.bytes and time.monotonic() < deadline:
        there, here = _size(runs, case, is_copy=False), _size(runs, case, is_copy=True)
        if case.per_second and 0 < there < case.bytes:
            rate = case.nodes * case.streams_per_node * case.per_second * LINE_BYTES
            late.append((there - here) / rate)
        if len(agents) < case.nodes:
            agents = [agent for node in testbed.node_names[: case.nodes] for agent in agents_on(testbed, node)]
        counters["launcher"].look([launcher])
        counters["agents"].look(agents)
        counters["sshd"].look({parent for agent in agents for parent in _sshd_above(agent)})
        time.sleep(LOOK_S)
    elapsed = time.monotonic() - begin
    return Figures(
        elapsed,
        here / elapsed,
        all(_is_identical(run, case.streams_per_node) for run in runs),
        statistics.median(late) if late else None,
        max(late) if late else None,
        **{name: counter.usage(elapsed) for name, counter in counters.items()},
    )


def _sshd_above(agent: psutil.Process) -> list[psutil.Process]:
    """The sshd processes of its connection; the one that listens serves everybody."""
    try:
        return [parent for parent in agent.parents() if "sshd" in parent.name() and parent.ppid() != 1]
    except psutil.Error:
        return []


def _size(runs: Sequence[Any], case: Case, *, is_copy: bool) -> int:
    total = 0
    for run in runs:
        for rank in range(case.streams_per_node):
            path = run.log(rank) if is_copy else run.there / "logs" / run.node / run.log(rank).name
            total += path.stat().st_size if path.exists() else 0
    return total


def _is_identical(run: Any, files: int) -> bool:
    logs = [run.log(rank) for rank in range(files)]
    return all(log.read_bytes() == (run.there / "logs" / run.node / log.name).read_bytes() for log in logs)


def show(name: str, figures: Figures) -> None:
    """Prints a few lines."""
    print(name)
    whole = "every log identical" if figures.is_identical else "LOGS DIFFER"
    print(f"  {figures.elapsed_s:.1f} s, {figures.bytes_per_s / 1e6:.1f} MB/s, {whole}")
    if figures.late_median_s is not None:
        print(f"  late: median {figures.late_median_s:.2f} s, at most {figures.late_max_s:.2f} s")
    for who in ("launcher", "agents", "sshd"):
        usage: Usage = getattr(figures, who)
        print(f"  {who:>8}: {usage.cpu_share:6.1%} of a core, {usage.peak_rss_bytes / 2**20:6.1f} MiB at most")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from testkit.testbed_fixture import Testbeds

    before = environment(torch.device("cpu"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        testbeds = Testbeds(Path(folder))
        try:
            testbed = testbeds.make(nodes=4, rails=1)
            for case in cases(args.seconds):
                figures = measure(case, testbed, Path(folder))
                show(case.name, figures)
                rows.append({"case": asdict(case), **asdict(figures)})
        finally:
            testbeds.close()
    if args.output:
        command = shlex.join(["python", "-m", "benchmarks.bench_logs", *sys.argv[1:]])
        args.output.write_text(json.dumps({"command": command, "environment": before, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
