"""How much memory there is: of a device by its name, of this machine, or as the configuration says; and what fits in.

Device memory is all that the driver reports; what no tensor can have of it is in `engine.planning.memory.ranks`.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig
from engine.planning.time.machine import DEFAULT_DEVICE, find_device, unknown_device
from engine.runs.host_memory import PROC, group_limit_bytes, meminfo_bytes

MIB = 2**20
# The operating system, the page cache that data are read through, and the processes' own code.
HOST_RESERVE_SHARE = 0.03


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine as the driver names it."""

    name: str
    total_bytes: int


@dataclass(frozen=True)
class Hardware:
    """What this machine has."""

    gpus: tuple[Gpu, ...]
    host_bytes: int | None
    host_source: str


@dataclass(frozen=True)
class Fit:
    """What a rank needs against the capacity; headroom: of the fuller memory, negative if bytes are missing."""

    device: bool
    host: bool
    headroom_bytes: int

    @property
    def fits(self) -> bool:
        """Both."""
        return self.device and self.host


@dataclass(frozen=True)
class Capacity:
    """Memory that a run may use.

    device_bytes          of one device, for one rank
    host_bytes_per_node   for all ranks of a node together; None: unknown
    host_is_device        ranks compute on the CPU: device memory is a share of host memory, and both count together
    """

    device_name: str
    device_bytes: int
    device_source: str
    host_bytes_per_node: int | None
    host_source: str
    local_ranks: int
    host_is_device: bool = False

    def fit(self, device_bytes: int, host_bytes: int) -> Fit:
        """Whether a rank that needs so much at its worst moments has it; of host memory an equal share."""
        left = [self.device_bytes - device_bytes]
        if self.host_is_device:
            left = 2 * [left[0] - host_bytes]
        elif self.host_bytes_per_node is not None:
            left.append(self.host_bytes_per_node // self.local_ranks - host_bytes)
        return Fit(left[0] >= 0, all(size >= 0 for size in left[1:]), min(left))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "device": self.device_name,
            "device_capacity_bytes": self.device_bytes,
            "device_source": self.device_source,
            "host_capacity_bytes": self.host_bytes_per_node,
            "host_source": self.host_source,
            "local_ranks": self.local_ranks,
            "host_is_device": self.host_is_device,
        }


def capacity_of(
    config: RunConfig, local_ranks: int, *, device: str | None = None, hardware: Hardware | None = None
) -> Capacity:
    """The memory of a run with `local_ranks` ranks on every node; memory.device_bytes and memory.host_bytes overrule.

    device     cpu, a name (a100, "NVIDIA H100 80GB HBM3") or bytes (80e9); None: as cluster.machine and
               cluster.backend say, else this machine's GPUs, else an H100
    hardware   this machine, from `find_hardware`; None: it is asked

    Raises ConfigError for a device that is not known.
    """
    here, memory = hardware or find_hardware(), config.memory
    name = device or configured_device(config) or (here.gpus[0].name if here.gpus else DEFAULT_DEVICE)
    found = _capacity(name, local_ranks, here, memory)
    return (
        found
        if memory.device_bytes is None
        else replace(found, device_bytes=memory.device_bytes, device_source="memory.device_bytes")
    )


def configured_device(config: RunConfig) -> str | None:
    """What the configuration says about the device, if anything."""
    cluster = config.cluster
    if cluster.backend == "gloo" and not cluster.ranks_share_device:
        return "cpu"
    return None if cluster.machine.name == "auto" else cluster.machine.name


@functools.cache
def find_hardware() -> Hardware:
    """What this machine has, asked once: GPUs by nvidia-smi, host memory by /proc/meminfo within the limit of its
    control group.
    """
    return Hardware(read_nvidia_smi(), *host_memory())


def read_nvidia_smi() -> tuple[Gpu, ...]:
    """GPUs as nvidia-smi lists them; none without it, or when it does not answer in time."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """GPUs in lines such as `NVIDIA H200, 143771`; a line whose memory is no number ([N/A]) is left out."""
    rows = [line.rpartition(",") for line in text.splitlines()]
    return tuple(Gpu(name.strip(), int(mib) * MIB) for name, _, mib in rows if mib.strip().isdigit())


def host_memory(proc: str = PROC) -> tuple[int | None, str]:
    """(bytes that processes here may use, where the number is from); the smallest of RAM and control group limits."""
    found = {
        "cgroup memory limit": group_limit_bytes("self", proc),
        "/proc/meminfo MemTotal": meminfo_bytes("MemTotal", proc),
    }
    known = [(size, source) for source, size in found.items() if size is not None]
    size, source = min(known, default=(None, "unknown"))
    return None if size is None else round(size * (1 - HOST_RESERVE_SHARE)), source


def _capacity(name: str, local_ranks: int, here: Hardware, memory: MemoryConfig) -> Capacity:
    """A device by name or by bytes, with the host memory that the configuration says; else one of this machine has this
    machine's, and so has a CPU that no profile knows better.
    """
    said = None if memory.host_bytes is None else (memory.host_bytes, "memory.host_bytes")
    unknown: tuple[int | None, str] = (None, "unknown")
    of_here = said or (here.host_bytes, here.host_source)
    with contextlib.suppress(ValueError, OverflowError):
        if (given := int(float(name))) >= 1:
            return Capacity(f"{given / 1e9:.4g} GB", given, f"as given: {name} bytes", *(said or unknown), local_ranks)
    present = [gpu.total_bytes for gpu in here.gpus if gpu.name == name]
    if present:
        return Capacity(name, min(present), "nvidia-smi", *of_here, local_ranks)
    known = find_device(name)
    if known is None:
        raise ConfigError(f"device: {unknown_device(name, 'a number of bytes such as 80e9')}")
    measured = known.host_memory_bytes
    if known.is_cpu:
        total, origin = said or ((measured, known.source) if measured else of_here)
        if total is None:
            raise ConfigError("the memory of this machine is unknown; set memory.host_bytes")
        source = f"host memory of {known.name if measured else 'this machine'} ({origin}) / {local_ranks} ranks"
        return Capacity(known.name, total // local_ranks, source, total, origin, local_ranks, host_is_device=True)
    total = known.memory_bytes or memory.device_bytes
    if total is None:
        raise ConfigError(f"device: the memory of {known.name} is not known here; set memory.device_bytes")
    published = (measured, f"{known.source}, per node (set memory.host_bytes)") if measured else unknown
    return Capacity(known.name, total, f"{known.source}; {total // MIB} MiB", *(said or published), local_ranks)
