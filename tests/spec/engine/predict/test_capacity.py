"""How much memory there is: by name, by this machine's own files, by the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from testkit.sections import changed

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.predict.memory import Capacity, Gpu, Hardware, capacity_of, host_memory, parse_nvidia_smi
from engine.runs.process import memory_groups

GB, MIB = 10**9, 2**20
LAPTOP = Hardware((), 16 * GB, "test")
SERVER = Hardware((Gpu("NVIDIA H200", 143771 * MIB),) * 8, 1000 * GB, "test")
ON_CPU = {"cluster": {"backend": "gloo"}}
A100 = {"cluster": {"machine": {"name": "a100"}}}
DATASHEET = "H100 SXM datasheet"
H100 = Capacity(
    "h100", 81559 * MIB, f"{DATASHEET}; 81559 MiB", 2000 * GB, f"{DATASHEET}, per node (set memory.host_bytes)", 8
)


def found(hardware: Hardware, device: str | None = None, ranks: int = 8, **sections: dict[str, Any]) -> Capacity:
    return capacity_of(changed(RunConfig(), **sections), ranks, device=device, hardware=hardware)


def test_the_default_device_of_plans_is_an_h100() -> None:
    assert found(LAPTOP) == H100
    alone = found(LAPTOP, "gh200")  # which no vendor's server has eight of
    assert alone.host_bytes_per_node is None
    assert alone.host_source == "unknown"
    assert found(LAPTOP, "80GB") == Capacity("80GB", 80 * GB, "as given: 80,000,000,000 bytes", None, "unknown", 8)


def test_gpus_of_this_machine_are_planned_for() -> None:
    assert found(SERVER) == Capacity("NVIDIA H200", 143771 * MIB, "nvidia-smi", 1000 * GB, "test", 8)


def test_machine_of_the_configuration_is_preferred_to_the_local_gpus() -> None:
    assert found(SERVER, **A100).device_name == "a100"


def test_option_is_preferred_to_the_machine_of_the_configuration() -> None:
    assert found(SERVER, "h100", **A100).device_name == "h100"


def test_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"got 'h10'.*a size such as 80GB.*h100"):
        found(LAPTOP, "h10")


def test_gpu_of_unknown_memory_is_not_counted() -> None:
    text = "NVIDIA A100-SXM4-80GB, 81920\nNVIDIA GB10, [N/A]\n"
    assert parse_nvidia_smi(text) == (Gpu("NVIDIA A100-SXM4-80GB", 81920 * MIB),)


SHARE_OF_HOST = "host memory of this machine ({}) / 4 ranks"


def test_on_a_cpu_the_ranks_share_the_host_memory() -> None:
    expected = Capacity("cpu", 4 * GB, SHARE_OF_HOST.format("test"), 16 * GB, "test", 4, host_is_device=True)
    assert found(LAPTOP, ranks=4, **ON_CPU) == expected


def test_on_a_cpu_the_ranks_share_the_configured_host_memory() -> None:
    source = "memory.host_bytes"
    expected = Capacity("cpu", 2 * GB, SHARE_OF_HOST.format(source), 8 * GB, source, 4, host_is_device=True)
    assert found(LAPTOP, "cpu", 4, memory={"host_bytes": 8 * GB}) == expected


def test_on_a_cpu_unknown_host_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"memory of this machine is unknown; set memory\.host_bytes"):
        found(Hardware((), None, "unknown"), **ON_CPU)


@pytest.mark.parametrize("device", [None, "h100", "1GB", "cpu"])
def test_the_configuration_has_the_last_word(device: str | None) -> None:
    one = found(SERVER, device, 7, memory={"device_bytes": 5 * GB, "host_bytes": 7 * GB})
    assert one.device_bytes == 5 * GB
    assert one.host_bytes_per_node == 7 * GB
    assert one.device_source == "memory.device_bytes"
    assert one.host_source == "memory.host_bytes"


@pytest.mark.parametrize(
    ("host_gb", "shared", "needs", "fits", "headroom_gb"),
    [
        (None, False, (80, 900), (True, True), 0),
        (80, False, (70, 10), (True, True), 0),  # of eight ranks
        (80, False, (90, 3), (False, True), -10),
        (80, False, (70, 11), (True, False), -1),
        (80, True, (78, 2), (True, True), 0),  # both count together
        (80, True, (79, 2), (False, False), -1),
    ],
)
def test_what_fits_leaves_room_in_the_memory_that_is_fuller(
    host_gb: int | None, shared: bool, needs: tuple[int, int], fits: tuple[bool, bool], headroom_gb: int
) -> None:
    room = Capacity("d", 80 * GB, "", None if host_gb is None else host_gb * GB, "", 8, shared)
    fit = room.fit(*(size * GB for size in needs))
    assert (fit.device, fit.host) == fits
    assert fit.headroom_bytes == headroom_gb * GB
    assert fit.fits == all(fits)


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
    groups = memory_groups(proc=str(proc))
    assert len(groups) == len(set(groups))
