"""Control groups and counters of machines that are only folders here."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.supervise_rig import PYTHON_PATH, Rig
from testkit.waiting import wait_for

from cluster.agent.memory import MemoryWatch, oom_counter
from cluster.agent.messages import Spec, parse_spec
from cluster.agent.processes import read_entry
from cluster.agent.supervisor import Supervisor
from engine.runs.host_memory import memory_groups, usable_bytes

GIB = 2**30


def resident_bytes(pid: int) -> int:
    """What process `pid` holds; 0 when it is gone."""
    entry = read_entry(pid)
    return 0 if entry is None else entry.resident_bytes


class Machine:
    """A procfs and a control group hierarchy below a temporary folder."""

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
        v2 = f"0::{group}\n"
        v1 = f"5:devices:/\n4:memory:{group}\n0::/\n"
        self.write(self.proc / str(pid) / "cgroup", v2 if self.version == 2 else v1)

    def kills(self, group: str, count: int) -> None:
        name, text = ("memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 0\n")
        if self.version == 1:
            name, text = "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
        self.write(self.groups / group.strip("/") / name, text.format(count))

    def limit(self, group: str, text: str) -> None:
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        self.write(self.groups / group.strip("/") / name, text)

    def watch(self) -> MemoryWatch:
        return MemoryWatch(str(self.proc))


@pytest.mark.parametrize("version", [1, 2])
def test_groups_are_listed_from_the_inside_out(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version=version)
    machine.place("self", "/user.slice/job.scope")
    folders = tuple(str(machine.groups / place) for place in ("user.slice/job.scope", "user.slice", ""))
    assert memory_groups("self", str(machine.proc)) == folders


def test_container_without_a_namespace_sees_its_part_of_the_hierarchy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, root="/docker/abc")
    machine.place("self", "/docker/abc/job")
    assert memory_groups("self", str(machine.proc)) == (str(machine.groups / "job"), str(machine.groups))


def test_machine_without_control_groups_has_the_limit_and_the_counter_of_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert memory_groups("self", str(machine.proc)) == ()
    counter = oom_counter("self", str(machine.proc))
    assert counter is not None
    assert (counter.read(), counter.of_group) == (7, False)
    assert usable_bytes("self", str(machine.proc)) == 32 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_limit_is_the_least_of_all_groups_around(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version=version)
    machine.place("self", "/a/b")
    machine.limit("/a/b", "max\n" if version == 2 else "9223372036854771712\n")
    machine.limit("/a", f"{3 * GIB}\n")
    assert usable_bytes("self", str(machine.proc)) == 3 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_count_that_rose_is_evidence(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version=version)
    machine.place("self", "/job")
    machine.kills("/job", 4)
    watch = machine.watch()
    assert watch.oom_evidence(None) is None
    machine.kills("/job", 5)
    assert str(watch.oom_evidence(None)).startswith(f"oom_kill in {machine.groups}/job/")
    assert "rose from 4 to 5" in str(watch.oom_evidence(123))


def test_kill_elsewhere_on_the_machine_is_no_evidence(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.place("self", "/job")
    machine.kills("/job", 4)
    watch = machine.watch()
    machine.kills("/other", 1)
    machine.write(machine.proc / "vmstat", "oom_kill 8\n")
    assert watch.oom_evidence(None) is None


def test_group_of_the_rank_itself_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.place("self", "/launcher")
    machine.kills("/launcher", 0)
    machine.kills("/ranks", 2)
    watch = machine.watch()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        machine.place(child.pid, "/ranks")
        wait_for(lambda: resident_bytes(child.pid) > 4 * 2**20, "the child's memory")
        watch.sample([child.pid])
    finally:
        child.kill()
        child.wait()
    machine.kills("/launcher", 1)
    assert watch.oom_evidence(child.pid) is None
    machine.kills("/ranks", 3)
    assert "ranks" in str(watch.oom_evidence(child.pid))
    facts = watch.facts(child.pid)
    assert 2**20 < facts["memory"]["peak_bytes"] < GIB
    assert "ranks" in str(facts["evidence"])


def test_count_of_a_group_that_is_gone_is_remembered(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.place("self", "/job")
    machine.kills("/job", 4)
    watch = machine.watch()
    machine.kills("/job", 5)
    watch.sample([])
    (machine.groups / "job" / "memory.events").unlink()
    assert "rose from 4 to 5" in str(watch.oom_evidence(None))


def test_run_that_filled_its_memory_gets_a_hint_when_the_kernel_says_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(machine.proc / "meminfo", "MemTotal: 1024 kB\n")
    watch = machine.watch()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        wait_for(lambda: resident_bytes(child.pid) > 4 * 2**20, "the child's memory")
        watch.sample([child.pid])
    finally:
        child.kill()
        child.wait()
    facts = watch.facts(child.pid)
    assert facts["evidence"] is None
    assert "Lack of memory may be the reason" in str(facts["hint"])
    assert machine.watch().facts(child.pid)["hint"] is None  # nothing was seen


def test_killed_rank_that_was_counted_is_in_the_outcome(tmp_path: Path) -> None:
    """No kernel: the rank counts its own death, in the procfs of a machine without control groups."""
    machine, rig = Machine(tmp_path), Rig(tmp_path)
    spec = parse_spec(
        rig.spec("counted", environment={"PYTHONPATH": PYTHON_PATH, "FAKE_VMSTAT": str(machine.proc / "vmstat")})
    )
    for folder in (rig.files().state_dir, rig.files().log_dir):
        Path(folder).mkdir(parents=True)
    process = multiprocessing.get_context("spawn").Process(target=supervise, args=(spec, str(machine.proc)))
    process.start()
    process.join(60)
    outcome = rig.outcome()
    (death,) = (death for death in outcome["deaths"] if death["rank"] == 1)  # the other, if seen, was stopped for it
    for facts in (outcome["memory"], death["memory"]):
        assert f"oom_kill of the whole machine in {machine.proc / 'vmstat'} rose from 7 to 8" == facts["evidence"]
        assert facts["memory"]["peak_bytes"] > 50 * 2**20
        assert facts["memory"]["capacity_bytes"] == 32 * GIB
    assert rig.processes() == []


def supervise(spec: Spec, proc: str) -> None:
    """A supervisor in a process of its own, on a machine that is a folder."""
    Supervisor(spec, MemoryWatch(proc)).run()
