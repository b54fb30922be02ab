"""Available memory of devices and hosts, and predictions of the memory of a step by a subprocess. No torch.

`engine.training.fake_run.memory` runs a step on fake ranks and imports torch, which must stay out of this process. The
subprocess starts with the first request, answers requests one after another, and exits when idle. Device memory is all
that the driver reports; the part that tensors cannot use is in `engine.predict.memory_ranks`.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal

from engine.config.errors import ConfigError, RunError
from engine.config.schema import to_plain
from engine.config.settings import DataConfig, MemoryConfig, RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.machine import DEFAULT_DEVICE, device_bytes, find_device, unknown_device
from engine.runs.process import PROC, group_limit_bytes, meminfo_bytes
from engine.runs.record import python_path

MIB = 2**20
# Operating system, page cache of the data files, and the code of the processes.
HOST_RESERVE_SHARE = 0.03


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, with the name that the driver reports."""

    name: str
    total_bytes: int


@dataclass(frozen=True)
class Hardware:
    """GPUs and host memory of this machine."""

    gpus: tuple[Gpu, ...]
    host_bytes: int | None
    host_source: str


@dataclass(frozen=True)
class Fit:
    """Whether a rank fits on device and host; headroom: of the fuller memory, negative if bytes are missing."""

    device: bool
    host: bool
    headroom_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it fits on both."""
        return self.device and self.host


@dataclass(frozen=True)
class Capacity:
    """Memory that a run may use.

    device_bytes          memory of one device, for one rank
    host_bytes_per_node   host memory for all ranks of a node together; None: unknown
    host_is_device        ranks compute on the CPU: device memory is a share of host memory, so both are added
    """

    device_name: str
    device_bytes: int
    device_source: str
    host_bytes_per_node: int | None
    host_source: str
    local_ranks: int
    host_is_device: bool = False

    def fit(self, device_bytes: int, host_bytes: int) -> Fit:
        """Return whether a rank with these peaks fits; host memory is shared equally by the ranks of a node."""
        left = [self.device_bytes - device_bytes]
        if self.host_is_device:
            left = 2 * [left[0] - host_bytes]
        elif self.host_bytes_per_node is not None:
            left.append(self.host_bytes_per_node // self.local_ranks - host_bytes)
        return Fit(left[0] >= 0, all(size >= 0 for size in left[1:]), min(left))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
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
    """Return the memory of a run with `local_ranks` ranks per node; memory.device_bytes and .host_bytes override it.

    Args:
        config: The configuration.
        local_ranks: Ranks per node.
        device: cpu, a name (a100, "NVIDIA H100 80GB HBM3") or a size (80GB). None: from cluster.machine and
            cluster.backend, else this machine's GPUs, else an H100.
        hardware: This machine. None: `find_hardware` is called.

    Raises:
        ConfigError: The device is unknown.
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
    """Return the configured device; None if it is not configured."""
    cluster = config.cluster
    if cluster.backend == "gloo" and not cluster.ranks_share_device:
        return "cpu"
    return None if cluster.machine.name == "auto" else cluster.machine.name


@functools.cache
def find_hardware() -> Hardware:
    """Return GPUs (nvidia-smi) and host memory (/proc/meminfo, cgroup limit) of this machine; cached."""
    return Hardware(read_nvidia_smi(), *host_memory())


def read_nvidia_smi() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists; empty without it, or if it does not answer in time."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Parse GPUs from lines such as `NVIDIA H200, 143771`; lines without a number of MiB ([N/A]) are skipped."""
    rows = [line.rpartition(",") for line in text.splitlines()]
    return tuple(Gpu(name.strip(), int(mib) * MIB) for name, _, mib in rows if mib.strip().isdigit())


def host_memory(proc: str = PROC) -> tuple[int | None, str]:
    """Return (bytes, source): the smallest of RAM and cgroup limits; None if unknown."""
    found = {
        "cgroup memory limit": group_limit_bytes("self", proc),
        "/proc/meminfo MemTotal": meminfo_bytes("MemTotal", proc),
    }
    known = [(size, source) for source, size in found.items() if size is not None]
    size, source = min(known, default=(None, "unknown"))
    return None if size is None else round(size * (1 - HOST_RESERVE_SHARE)), source


def _capacity(name: str, local_ranks: int, here: Hardware, memory: MemoryConfig) -> Capacity:
    """Return the capacity of a device given by name or size.

    Host memory is the configured one; else this machine's, for its own devices and for a CPU without a profile.
    """
    said = None if memory.host_bytes is None else (memory.host_bytes, "memory.host_bytes")
    unknown: tuple[int | None, str] = (None, "unknown")
    of_here = said or (here.host_bytes, here.host_source)
    if (given := device_bytes(name)) is not None:
        return Capacity(name, given, f"as given: {given:,} bytes", *(said or unknown), local_ranks)
    present = [gpu.total_bytes for gpu in here.gpus if gpu.name == name]
    if present:
        return Capacity(name, min(present), "nvidia-smi", *of_here, local_ranks)
    known = find_device(name)
    if known is None:
        raise ConfigError(f"device: {unknown_device(name, 'a size such as 80GB')}")
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


# --- predictions from a subprocess ------------------------------------------------------------------------------------


_EXCEPTION = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")
SERVER_MODULE = "engine.training.fake_run.memory"
IDLE_S = 30.0  # the subprocess exits after this time without a request
TIMEOUT_S = 600.0

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MemoryPrediction:
    """Peak memory in bytes of the rank that needs the most; on a CPU, `device` are tensors outside activation stores.

    rank             that rank; `host` figures are per rank, too: multiply by the local ranks for a node
    phase            phase of the device peak: forward, loss, backward or optimizer
    components       {"device": {name: bytes}, "host": {...}} at the two peaks
    phase_peaks      peak device bytes of every phase
    reserve_bytes    additional bytes on CUDA: context, communicators, fragmentation
    seconds          duration of the prediction
    """

    device: DeviceKind
    world_size: int
    rank: int
    device_peak_bytes: int
    host_peak_bytes: int
    phase: str
    components: Mapping[str, Mapping[str, int]]
    phase_peaks: Mapping[str, int]
    reserve_bytes: int
    seconds: float

    @property
    def needed_bytes(self) -> int:
        """Device memory that must be free on a GPU."""
        return self.device_peak_bytes + self.reserve_bytes

    @property
    def needs(self) -> tuple[int, int]:
        """(device, host) bytes: the arguments of `Capacity.fit`."""
        return self.needed_bytes, self.host_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}


# Predicts the memory of a configuration and its method on the ranks of a topology (the whole world).
Predict = Callable[[RunConfig, AttentionMethod, Topology], MemoryPrediction]


def missing_library(config: RunConfig) -> str | None:
    """Return why memory cannot be predicted on this machine for want of a library; None if it can."""
    if config.model.implementation != "hf" or importlib.util.find_spec("transformers") is not None:
        return None
    return (
        "the memory of model.implementation=hf is predicted with transformers, which is not installed here; "
        "run: pip install 'burst-train[transformers]' (memory=auto needs it; memory=full does not)"
    )


class Predictor:
    """Sends requests to a subprocess, and caches the answers."""

    _errors: IO[str]  # standard error of the subprocess

    def __init__(self, module: str = SERVER_MODULE, timeout_s: float = TIMEOUT_S) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def predict(self, config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        """Return the prediction for `config`, which names its memory policy, with `method` on the ranks of `world`.

        Raises ConfigError if the configuration cannot run on these ranks, RunError if the subprocess fails or does not
        answer within the time limit, or would need transformers, which is not installed.
        """
        if (problem := missing_library(config)) is not None:
            raise RunError(problem)
        return MemoryPrediction(**self._ask(_without_what_takes_no_memory(config), method, world))

    def start(self) -> subprocess.Popen[str]:
        """Return the subprocess, started if none is running; callers may start it before their first request."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()  # files of a subprocess that has exited
        # Tensors have no values there, so no GPU is needed: hide GPUs that may be in use.
        environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", self._module]
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 open while the process runs
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environment
        )
        return self._process

    def close(self) -> None:
        """Stop the subprocess, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _ask(self, config: RunConfig, method: AttentionMethod, world: Topology) -> dict[str, Any]:
        request = json.dumps({"config": to_plain(config), "method": to_plain(method), "world": to_plain(world)})
        if request not in self._known:
            # An idle process may exit just when this request arrives.
            document = json.loads(self._answer(request, again=True) or self._answer(request))
            if "problems" in document:
                raise ConfigError(document["problems"])
            self._known[request] = document
        return self._known[request]

    def _answer(self, request: str, *, again: bool = False) -> str:
        """Return one line; empty if the process had exited before and the request may be sent `again`."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        if not select.select([process.stdout], [], [], self._timeout_s)[0]:
            self.close()
            raise RunError(f"the prediction did not end within {self._timeout_s:.0f} s and was stopped.")
        answer = process.stdout.readline()
        if answer or (again and process.wait() == 0):
            return answer
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["no error output"]
        # An exception may end in several lines of advice; its first line names it.
        message = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
        raise RunError(f"the prediction failed with exit code {process.wait()}: {message}.")


@functools.cache
def shared_predictor() -> Predictor:
    """Return the predictor of this process: importing torch takes longer than most predictions."""
    predictor = Predictor()
    atexit.register(predictor.close)
    return predictor


def _without_what_takes_no_memory(config: RunConfig) -> RunConfig:
    """Return the configuration without settings that do not affect memory, so that equal requests share an answer."""
    plain = RunConfig()
    return replace(
        config,
        exp=plain.exp,
        seed=plain.seed,
        data=DataConfig(),
        model=replace(config.model, name=plain.model.name, init_from=None, require_init_from=False),
        train=replace(
            config.train,
            steps=plain.train.steps,
            checkpoint=plain.train.checkpoint,
            guard=plain.train.guard,
            compile=False,
        ),
        memory=replace(config.memory, device_bytes=None, host_bytes=None),
        optimizer=replace(plain.optimizer, max_grad_norm=config.optimizer.max_grad_norm),
        cluster=replace(plain.cluster, backend=config.cluster.backend, machine=config.cluster.machine),
    )
