"""Control groups and counters of machines that are only folders here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.machine_clock import at_most
from testkit.waiting import wait_for

from cluster.agent.memory import MemoryWatch, oom_counter
from engine.runs.process import group_limit_bytes, read_entry, usable_bytes

GIB = 2**30


class Machine:
    """A procfs and a control group hierarchy, of which `root` is seen, below a temporary folder."""

    def __init__(self, folder: Path, *, version: int = 2, root: str = "/") -> None:
        self.proc, self.groups, self.version = folder / "proc", folder / "cgroup", version
        self.write(self.proc / "meminfo", "MemTotal:       33554432 kB\nMemFree: 1 kB\n")
        self.write(self.proc / "vmstat", "nr_free_pages 5\noom_kill 7\n")
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        mounts = f"24 1 0:22 / /sys rw - sysfs sysfs rw\n35 31 0:32 {root} {self.groups} rw,relatime - {kind}\n"
        self.write(self.proc / "self" / "mountinfo", mounts)
        self.groups.mkdir()

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def place(self, pid: int | str, group: str) -> None:
        """Process `pid` lives in `group`."""
        v1 = f"5:devices:/\n4:memory:{group}\n0::/\n"
        self.write(self.proc / str(pid) / "cgroup", f"0::{group}\n" if self.version == 2 else v1)

    def kills(self, group: str, count: int) -> Path:
        """The file that says so."""
        v2 = self.version == 2
        path = self.groups / group.strip("/") / ("memory.events" if v2 else "memory.oom_control")
        head, tail = ("low 0\noom 3\n", "oom_group_kill 0\n") if v2 else ("oom_kill_disable 0\nunder_oom 0\n", "")
        self.write(path, f"{head}oom_kill {count}\n{tail}")
        return path

    def limit(self, group: str, bound: int | None) -> None:
        none = "max" if self.version == 2 else "9223372036854771712"
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        self.write(self.groups / group.strip("/") / name, f"{bound or none}\n")

    def counter(self) -> tuple[str, bool, int]:
        found = oom_counter("self", str(self.proc))
        assert found is not None
        return found.path, found.of_group, found.read()

    def watch(self) -> MemoryWatch:
        return MemoryWatch(str(self.proc))


@pytest.fixture
def child() -> Iterator[int]:
    """A process that holds some memory, and will not take more."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("root", ["/", "/docker/abc"])  # of a container without a namespace of its own
def test_the_nearest_group_that_counts_and_the_tightest_limit_are_found(
    tmp_path: Path, version: int, root: str
) -> None:
    machine = Machine(tmp_path, version=version, root=root)
    assert usable_bytes("self", str(machine.proc)) == 32 * GIB
    assert machine.counter() == (str(machine.proc / "vmstat"), False, 7)
    machine.place("self", f"{root.rstrip('/')}/user.slice/job.scope")
    assert machine.counter() == (str(machine.proc / "vmstat"), False, 7)
    for group in ("", "user.slice", "user.slice/job.scope"):
        path = machine.kills(group, 3)
        assert machine.counter() == (str(path), True, 3)
    machine.limit("user.slice/job.scope", None)
    assert group_limit_bytes("self", str(machine.proc)) is None
    machine.limit("user.slice", 3 * GIB)
    machine.limit("", 4 * GIB)
    assert usable_bytes("self", str(machine.proc)) == 3 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_count_that_rose_is_evidence_also_once_its_group_is_gone(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version=version)
    machine.place("self", "/job")
    path = machine.kills("/job", 4)
    watch = machine.watch()
    machine.kills("/other", 1)
    machine.write(machine.proc / "vmstat", "oom_kill 8\n")
    assert watch.oom_evidence(None) is None  # kills elsewhere
    machine.kills("/job", 5)
    watch.sample([])
    path.unlink()
    assert watch.oom_evidence(None) == watch.oom_evidence(123) == f"oom_kill in {path} rose from 4 to 5"


def test_group_of_the_rank_itself_decides(tmp_path: Path, child: int) -> None:
    machine = Machine(tmp_path)
    machine.place("self", "/launcher")
    machine.kills("/launcher", 0)
    path = machine.kills("/ranks", 2)
    watch = machine.watch()
    machine.place(child, "/ranks")
    machine.limit("/ranks", 2 * GIB)
    watch.sample([child])
    machine.kills("/launcher", 1)
    assert watch.oom_evidence(child) is None
    machine.kills("/ranks", 3)
    facts = watch.facts(child)
    assert 4 * 2**20 < facts["memory"]["peak_bytes"] < GIB
    source = {"peak_source": "resident set of the process, looked at every second", "requested_bytes": None}
    memory = {"where": "host", "device": "cpu", "capacity_bytes": 2 * GIB, **source}
    assert facts == {
        "evidence": f"oom_kill in {path} rose from 2 to 3",
        "hint": None,
        "memory": {**memory, "peak_bytes": facts["memory"]["peak_bytes"]},
    }
    assert watch.facts(None)["memory"] == {**memory, "peak_bytes": None}


def test_run_that_filled_its_memory_gets_a_hint_when_the_kernel_says_nothing(tmp_path: Path, child: int) -> None:
    entry = read_entry(child)
    assert entry is not None
    for share in (0.85, 0.95):
        machine = Machine(tmp_path / str(share))
        machine.write(machine.proc / "meminfo", f"MemTotal: {int(entry.resident_bytes / share) // 1024} kB\n")
        watch = machine.watch()
        assert watch.facts(child)["hint"] is None  # nothing was seen
        watch.sample([2**30, child])  # one that is gone already
        facts = watch.facts(child)
        assert facts["evidence"] is None
        told = "Lack of memory may be the reason: the run's processes held 0.0 GiB of 0.0 GiB in their last seconds."
        assert facts["hint"] == (told if share > 0.9 else None)
    fresh = machine.watch()
    fresh.sample([])
    with at_most(1.8):
        wait_for(lambda: fresh.sample([child]) or fresh.facts(child)["hint"], "the sample a second later")
