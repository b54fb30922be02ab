"""How much memory there is: of a device by its name, of this machine, or as the configuration says; and what fits in.

Device memory is all that the driver reports; what no tensor can have of it is in `engine.planning.memory.reserve`.
"""

from __future__ import annotations

import functools
import math
import subprocess
from dataclasses import dataclass
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.memory.predictor import MemoryPrediction
from engine.planning.time.machine import DEFAULT_DEVICE, Machine, find_device, unknown_device
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

    @property
    def host_bytes_per_rank(self) -> int | None:
        """An equal share of the node's host memory."""
        return None if self.host_bytes_per_node is None else self.host_bytes_per_node // self.local_ranks

    def headroom_bytes(self, device_peak_bytes: int, host_peak_bytes: int) -> int:
        """What one rank leaves free in the memory that is fuller; negative: so much is missing."""
        if self.host_is_device:
            return self.device_bytes - device_peak_bytes - host_peak_bytes
        headroom = self.device_bytes - device_peak_bytes
        if self.host_bytes_per_rank is not None:
            headroom = min(headroom, self.host_bytes_per_rank - host_peak_bytes)
        return headroom

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
    hardware   this machine, from `find_hardware`; None: it is asked, once

    Raises ConfigError for a device that is not known.
    """
    here = hardware or _this_machine()
    memory, name = config.memory, device or configured_device(config)
    found = _capacity(name or _default_device(here), local_ranks, here, memory.host_bytes)
    if memory.device_bytes is None and memory.host_bytes is None:
        return found
    return Capacity(
        found.device_name,
        memory.device_bytes or found.device_bytes,
        found.device_source if memory.device_bytes is None else "memory.device_bytes",
        memory.host_bytes or found.host_bytes_per_node,
        found.host_source if memory.host_bytes is None else "memory.host_bytes",
        local_ranks,
        found.host_is_device,
    )


def find_hardware() -> Hardware:
    """What this machine has: GPUs by nvidia-smi, host memory by /proc/meminfo within the limit of its control group."""
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
    size, source = min(
        ((size, source) for source, size in found.items() if size is not None), default=(None, "unknown")
    )
    return None if size is None else round(size * (1 - HOST_RESERVE_SHARE)), source


def configured_device(config: RunConfig) -> str | None:
    """What the configuration says about the device, if anything."""
    cluster = config.cluster
    if cluster.backend == "gloo" and not cluster.ranks_share_device:
        return "cpu"
    return None if cluster.machine.name == "auto" else cluster.machine.name


def _default_device(here: Hardware) -> str:
    return here.gpus[0].name if here.gpus else DEFAULT_DEVICE


@functools.cache
def _this_machine() -> Hardware:
    return find_hardware()


def _cpu(known: Machine, local_ranks: int, here: Hardware, host_bytes: int | None) -> Capacity:
    """A rank's share of the host memory that a profile knows, else of this machine's."""
    measured = known.host_memory_bytes
    total = host_bytes or measured or here.host_bytes
    if total is None:
        raise ConfigError("the memory of this machine is unknown; set memory.host_bytes")
    origin = "memory.host_bytes" if host_bytes else known.source if measured else here.host_source
    source = f"host memory of {known.name if measured else 'this machine'} ({origin}) / {local_ranks} ranks"
    return Capacity(known.name, total // local_ranks, source, total, origin, local_ranks, host_is_device=True)


def _capacity(name: str, local_ranks: int, here: Hardware, host_bytes: int | None) -> Capacity:
    """A device by name or by bytes; one of this machine has this machine's host memory, as CPUs have."""
    try:
        given = float(name)
    except ValueError:
        given = 0.0
    if 1 <= given < math.inf:
        return Capacity(f"{given / 1e9:.4g} GB", int(given), f"as given: {name} bytes", None, "unknown", local_ranks)
    present = [gpu for gpu in here.gpus if gpu.name == name]
    if present:
        total = min(gpu.total_bytes for gpu in present)
        return Capacity(name, total, "nvidia-smi", here.host_bytes, here.host_source, local_ranks)
    known = find_device(name)
    if known is None:
        raise ConfigError(f"device: {unknown_device(name, 'a number of bytes such as 80e9')}")
    if known.is_cpu:
        return _cpu(known, local_ranks, here, host_bytes)
    if known.memory_bytes is None:
        raise ConfigError(f"device: the memory of {known.name} is not known here; set memory.device_bytes")
    source = f"{known.source}; {known.memory_bytes // MIB} MiB"
    of_node = known.host_memory_bytes
    host_source = "unknown" if of_node is None else f"{known.source}, per node (set memory.host_bytes)"
    return Capacity(known.name, known.memory_bytes, source, of_node, host_source, local_ranks)


@dataclass(frozen=True)
class Fit:
    """One figure against the capacity; headroom is of the memory that is fuller, negative if bytes are missing."""

    device: bool
    host: bool
    headroom_bytes: int

    @property
    def fits(self) -> bool:
        """Both."""
        return self.device and self.host


def fit_of(device_bytes: int, host_bytes: int, capacity: Capacity) -> Fit:
    """Whether a rank that needs so much fits."""
    headroom = capacity.headroom_bytes(device_bytes, host_bytes)
    if capacity.host_is_device:
        return Fit(headroom >= 0, headroom >= 0, headroom)
    per_rank = capacity.host_bytes_per_rank
    return Fit(device_bytes <= capacity.device_bytes, per_rank is None or host_bytes <= per_rank, headroom)


def predicted_fit(prediction: MemoryPrediction, capacity: Capacity) -> Fit:
    """Whether what was predicted fits."""
    return fit_of(prediction.needed_bytes, prediction.host_peak_bytes, capacity)
