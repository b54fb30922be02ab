"""A flood and an endless line through a real link: nothing is lost, and memory does not grow with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit import KIT
from testkit.link_rig import RemoteRun, agents_on, begin, start_launcher, swept

from cluster.ssh.pool import SshPool
from cluster.testbed.build import Testbed

MIB = 1 << 20
# Python with paramiko takes 50 to 60 MiB before it has mirrored a byte; windows and frames are at most 2 MiB a node.
LAUNCHER_BYTES = 120 * MIB
BRIDGE_BYTES = 60 * MIB


@pytest.fixture
def pool() -> Iterator[SshPool]:
    with SshPool() as made:
        yield made


def end(launcher: subprocess.Popen[bytes]) -> None:
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()


def peak_bytes(pid: int) -> int:
    """The most memory that a process had resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def sweep(run: RemoteRun, pool: SshPool) -> None:
    link = run.link(pool)
    link.follow()
    assert swept(link) == ()
    link.close()
    assert link.join(60.0)


def test_a_flood_and_a_line_without_end_pass_in_bounded_memory(testbed4: Testbed, tmp_path: Path, pool: SshPool):
    run = RemoteRun.on(testbed4, testbed4.node_names[0], tmp_path)
    size = 100 * MIB
    endless = f"head -c {size} /dev/zero | tr '\\0' x >$BURST_RANK_LOGS/rank0001.log"
    flood = f"{sys.executable} -S {KIT}/fake_rank.py lines 1 1000000 0"
    launcher = start_launcher(testbed4, [run])
    try:
        link = run.link(pool)
        begin(link, run.spec("sh", "-c", f"{endless} & {flood}; wait"))
        link.close()
        assert link.join(60.0)
        copied = 1_000_000 * 100 + size
        peaks: list[int] = []
        while sum(run.log(rank).stat().st_size for rank in (0, 1) if run.log(rank).exists()) < copied:
            for bridge in agents_on(testbed4, run.node):  # that of the closed link may still be ending
                with contextlib.suppress(OSError, IndexError):  # it ends with its connection
                    peaks.append(peak_bytes(bridge.pid))
            time.sleep(0.1)
        peak = peak_bytes(launcher.pid)
    finally:
        end(launcher)
        sweep(run, pool)

    assert run.check_logs(2) == copied
    assert peak < LAUNCHER_BYTES
    assert max(peaks) < BRIDGE_BYTES
