"""How much memory there is: by name, by this machine's own files, by the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testkit.sections import changed

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.memory.capacity import (
    MIB,
    Capacity,
    Gpu,
    Hardware,
    capacity_of,
    host_memory,
    parse_nvidia_smi,
)

LAPTOP = Hardware((), 16 * 10**9, "test")
SERVER = Hardware((Gpu("NVIDIA H200", 143771 * MIB),) * 8, 10**12, "test")


def config(**sections: dict[str, Any]) -> RunConfig:
    return changed(RunConfig(), **sections)


def test_an_h100_is_planned_for_where_nothing_says_otherwise() -> None:
    source = "H100 SXM datasheet"
    host_source = f"{source}, per node (set memory.host_bytes)"
    assert capacity_of(config(), 8, hardware=LAPTOP) == Capacity(
        "h100", 81559 * MIB, f"{source}; 81559 MiB", 2 * 10**12, host_source, 8
    )
    alone = capacity_of(config(), 8, device="gh200", hardware=LAPTOP)  # which no vendor's server has eight of
    assert (alone.host_bytes_per_rank, alone.host_source) == (None, "unknown")
    given = Capacity("80 GB", 80 * 10**9, "as given: 80e9 bytes", None, "unknown", 8)
    assert capacity_of(config(), 8, device="80e9", hardware=LAPTOP) == given


def test_the_gpus_of_this_machine_come_after_an_option_and_a_named_machine_alone() -> None:
    found = capacity_of(config(), 8, hardware=SERVER)
    assert found == Capacity("NVIDIA H200", 143771 * MIB, "nvidia-smi", 10**12, "test", 8)
    named = config(cluster={"machine": {"name": "a100"}})
    assert capacity_of(named, 8, hardware=SERVER).device_name == "a100"
    assert capacity_of(named, 8, device="h100", hardware=SERVER).device_name == "h100"
    with pytest.raises(ConfigError, match=r"got 'h10'.*bytes such as 80e9.*h100"):
        capacity_of(config(), 8, device="h10", hardware=LAPTOP)
    text = "NVIDIA A100-SXM4-80GB, 81920\nNVIDIA GB10, [N/A]\n"
    assert parse_nvidia_smi(text) == (Gpu("NVIDIA A100-SXM4-80GB", 81920 * MIB),)


def test_on_a_cpu_the_ranks_share_the_host_memory() -> None:
    found = capacity_of(config(cluster={"backend": "gloo"}), 4, hardware=LAPTOP)
    assert (found.device_name, found.device_bytes, found.host_is_device) == ("cpu", 4 * 10**9, True)
    assert found.fit(3 * 10**9, 2 * 10**9).headroom_bytes == -(10**9)


def test_the_configuration_has_the_last_word() -> None:
    memory = {"device_bytes": 5 * 10**9, "host_bytes": 7 * 10**9}
    for device in (None, "h100", "1e9", "cpu"):
        found = capacity_of(config(memory=memory), 7, device=device, hardware=SERVER)
        assert (found.device_bytes, found.host_bytes_per_rank) == (5 * 10**9, 10**9)
        assert (found.device_source, found.host_source) == ("memory.device_bytes", "memory.host_bytes")


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """(/proc, /sys/fs/cgroup) of a machine with 8 GiB."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree:  1 kB\n")
    mounts = (f"/ {cgroup} rw - cgroup2 cgroup2 rw", f"/ {cgroup}/memory rw - cgroup cgroup rw,memory")
    (proc / "self" / "mountinfo").write_text("".join(f"35 31 0:32 {mount}\n" for mount in mounts))
    return proc, cgroup


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/jobs/one\n", "jobs/one/memory.max"),
        ("0::/jobs/one\n", "jobs/memory.max"),  # a parent's limit binds, too
        ("0::/\n", "memory.max"),  # seen from inside a container
        ("9:memory:/jobs/one\n8:cpu:/x\n", "memory/jobs/one/memory.limit_in_bytes"),
        ("9:cpu,memory:/jobs\n", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_the_control_group_binds(machine: tuple[Path, Path], group: str, file: str) -> None:
    proc, cgroup = machine
    assert host_memory(str(proc)) == (round(8 * 2**30 * 0.97), "/proc/meminfo MemTotal")
    (proc / "self" / "cgroup").write_text(group)
    (cgroup / file).parent.mkdir(parents=True, exist_ok=True)
    (cgroup / file).write_text(f"{2**30}\n")
    assert host_memory(str(proc)) == (round(2**30 * 0.97), "cgroup memory limit")


def test_ranks_on_the_cpu_say_whose_bytes_they_count() -> None:
    given = capacity_of(config(memory={"host_bytes": 8 * 10**9}), 4, device="cpu", hardware=LAPTOP)
    assert (given.device_bytes, given.host_source) == (2 * 10**9, "memory.host_bytes")
    assert "memory.host_bytes" in given.device_source
    found = capacity_of(config(), 4, device="cpu", hardware=LAPTOP)
    assert found.host_source == LAPTOP.host_source
    assert found.device_source != given.device_source
