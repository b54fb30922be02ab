"""What the sections of `cluster/probe/host.sh` say, as values. All raise UnreadableError for anything else."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe, Section

GIB = 1 << 30
_SAMPLE_CHARACTERS = 160


@dataclass(frozen=True)
class Limits:
    """Limits of an SSH session; `math.inf` where there is none. rdma_devices: adapters that need locked memory."""

    memlock_kib: float
    nofile_soft: float
    nofile_hard: float
    rdma_devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filesystem:
    """Room of the file system that holds a folder. inodes: 0 where they are made as needed (btrfs, some NFS)."""

    size_bytes: int
    free_bytes: int
    inodes: int
    inodes_free: int
    kind: str


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory, from /proc/meminfo."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Process:
    """One process. owner: a user name or `uid 1000`. name: as it calls itself, whatever that is."""

    pid: int
    owner: str
    age_s: float
    name: str
    run_id: str = ""


@dataclass(frozen=True)
class RunProcesses:
    """Processes with BURST_RUN_ID in their environment; `unread`: those that this user may not look into."""

    processes: tuple[Process, ...]
    unread: int


@dataclass(frozen=True)
class Software:
    """Versions on the node itself. python: None when there is none. packages: None when they cannot be listed.
    in_image: ranks run in containers, so that the image's versions count and not these."""

    python: str | None
    packages: Mapping[str, str] | None
    in_image: bool = False

    @property
    def nccl(self) -> str | None:
        """Version of the NCCL package that PyTorch wheels bring; None when there is none."""
        return next((found for name, found in sorted((self.packages or {}).items()) if name != "torch"), None)


@dataclass(frozen=True)
class NcclSettings:
    """NCCL_* by name: of /etc/nccl.conf, of the user's file, of an SSH session's environment."""

    system: Mapping[str, str] = field(default_factory=dict)
    user: Mapping[str, str] = field(default_factory=dict)
    session: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """The container engine. gpu_ways: what makes GPUs visible in containers; has_gpus: the NVIDIA driver is loaded."""

    version: str
    folder: str
    driver: str
    runtimes: tuple[str, ...]
    room: Filesystem | None
    gpu_ways: tuple[str, ...]
    has_gpus: bool


@dataclass(frozen=True)
class Image:
    """The image of the configuration on a node; identity: sha256 over what it is, equal wherever it is the same."""

    identity: str
    size_bytes: int


def parse_limits(probe: NodeProbe) -> Limits:
    """From `host.limits`."""
    section = _believed(probe, "host.limits")
    return Limits(
        _limit(section, "memlock"),
        _limit(section, "nofile_soft"),
        _limit(section, "nofile_hard"),
        tuple(_values(section, "rdma")),
    )


def parse_disks(probe: NodeProbe) -> Mapping[str, Filesystem | None]:
    """From `host.disk`: `root`, `tmp` and `shm`; None for one that the node does not have."""
    section = _believed(probe, "host.disk")
    absent = _values(section, "absent")
    return {name: None if name in absent else _filesystem(section, name) for name in ("root", "tmp", "shm")}


def parse_shared(probe: NodeProbe) -> Filesystem | None:
    """From `host.shared`: the file system of the shared folder; None when the probe was told of none.

    Raises UnreadableError, with the node's own words, when the folder is not there.
    """
    section = _believed(probe, "host.shared")
    if section.output.strip() == "unset":
        return None
    if section.output.splitlines()[-1:] == ["absent"]:
        raise UnreadableError("the folder is not there", _sample(section))
    return _filesystem(section, "shared")


def parse_memory(probe: NodeProbe) -> Memory:
    """From `host.memory`."""
    section = _believed(probe, "host.memory")
    kib = {}
    for name in ("MemTotal", "MemAvailable"):
        found = re.search(rf"^{name}: (\d{{1,15}}) kB$", section.output, re.M)
        if found is None:
            raise _unreadable(section, f"no {name}")
        kib[name] = int(found[1])
    if kib["MemTotal"] == 0:
        raise _unreadable(section, "MemTotal is 0")
    return Memory(kib["MemTotal"] << 10, kib["MemAvailable"] << 10)


def parse_runs(probe: NodeProbe) -> RunProcesses:
    """From `host.runs`."""
    section = _believed(probe, "host.runs")
    unread, readable = int(_number(section, "unread")), int(_number(section, "read"))
    if section.output.splitlines()[-1] != "end":
        raise _unreadable(section, "it stops midway")
    if readable + unread < 1:
        raise _unreadable(section, "not one process was seen")
    owners, ids = _pairs(section, "owner"), _pairs(section, "id")
    found = []
    for line in _values(section, "run"):
        match = re.fullmatch(r"(\d{1,9}) (\d{1,10}|\?) (\d{1,18}) ?(.*)", line)
        if match is None or match[1] not in ids:
            raise _unreadable(section, f"no process: {line[:40]!r}")
        owner = owners.get(match[2]) or f"uid {match[2]}"
        age_s = _age(section, int(match[3]))
        found.append(Process(int(match[1]), owner, age_s, match[4], run_id=ids[match[1]]))
    return RunProcesses(tuple(found), unread)


def parse_software(probe: NodeProbe) -> Software:
    """From `host.software`."""
    section = _believed(probe, "host.software")
    python = None
    if "python" not in _values(section, "absent"):
        python = _value(section, "python")
        if re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", python) is None:
            raise _unreadable(section, "no version of Python")
    packages = None
    if "read" in _values(section, "packages"):
        packages = _pairs(section, "package")
    in_image = _value(section, "runtime") == "docker"
    return Software(python, packages, in_image)


def parse_nccl_settings(probe: NodeProbe) -> NcclSettings:
    """From `host.nccl`."""
    section = _believed(probe, "host.nccl")
    if section.output.splitlines()[-1:] != ["end"]:
        raise _unreadable(section, "it stops midway")
    hidden = _values(section, "unreadable")
    if hidden:
        raise _unreadable(section, f"no permission to read the {' and the '.join(hidden)} file")
    return NcclSettings(*(_assignments(_values(section, name)) for name in ("system", "user", "session")))


def parse_engine(probe: NodeProbe) -> Engine:
    """From `host.docker`. Raises UnreadableError when no engine answers: a version of the server is the only proof."""
    section = _believed(probe, "host.docker")
    version = _json(section, "ServerVersion")
    if not isinstance(version, str) or not version:
        raise _unreadable(section, "the engine's daemon does not answer")
    runtimes = _json(section, "Runtimes")
    names = tuple(sorted(runtimes)) if isinstance(runtimes, dict) else ()
    return Engine(
        version=version,
        folder=str(_json(section, "DockerRootDir")),
        driver=str(_json(section, "Driver")),
        runtimes=names,
        room=_filesystem(section, "docker") if _values(section, "docker") else None,
        gpu_ways=gpu_ways(section, names),
        has_gpus=needs_gpu_containers(section),
    )


def gpu_ways(section: Section, runtimes: tuple[str, ...] = ()) -> tuple[str, ...]:
    """How containers of this node could see GPUs: a registered runtime, the toolkit's hook, device lists (CDI)."""
    ways = [f"runtime {name}" for name in runtimes if "nvidia" in name]
    ways += [f"hook {name}" for name in _values(section, "hook") if name == "nvidia-container-runtime-hook"]
    return tuple(ways + [f"CDI {name}" for name in _values(section, "cdi")])


def needs_gpu_containers(section: Section) -> bool:
    """Whether the NVIDIA driver is loaded on the node."""
    return "gpus" in section.output.splitlines()


def parse_image(probe: NodeProbe) -> Image | None:
    """From `host.image`; None when the probe was told of none. Raises UnreadableError when the node has no such image.

    The identity is over architecture, system, time of creation and layers: an engine's own id differs between the two
    ways in which Docker stores images.
    """
    section = _believed(probe, "host.image")
    if section.output.strip() == "unset":
        return None
    line, decoder, values = _value(section, "image"), json.JSONDecoder(), []
    try:
        while line:
            value, end = decoder.raw_decode(line)
            values.append(value)
            line = line[end:].lstrip()
        size = int(_number(section, "size"))
    except ValueError as error:
        raise _unreadable(section, "no description of an image") from error
    if len(values) != 4 or not isinstance(values[3], list) or not values[3]:
        raise _unreadable(section, "no layers")
    identity = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return Image(identity, size)


def image_absent(probe: NodeProbe) -> bool:
    """Whether the engine answered that it has no such image, which is not the same as no answer."""
    section = probe.section("host.image")
    return section.exit_code not in (None, 0, 127) and "no such image" in section.output.lower()


def _believed(probe: NodeProbe, name: str) -> Section:
    section = probe.section(name)
    if not section.ok:
        raise UnreadableError(section.trouble(), _sample(section))
    return section


def _unreadable(section: Section, why: str) -> UnreadableError:
    return UnreadableError(f"{section.name}: {why}", _sample(section))


def _sample(section: Section) -> str:
    return next((line.strip() for line in section.output.splitlines() if line.strip()), "")[:_SAMPLE_CHARACTERS]


def _values(section: Section, key: str) -> list[str]:
    """The rest of every line that begins with the word `key`."""
    lines = (line.split(" ", 1) for line in section.output.splitlines())
    return [line[1] for line in lines if len(line) == 2 and line[0] == key]


def _value(section: Section, key: str) -> str:
    found = _values(section, key)
    if len(found) != 1 or not found[0]:
        raise _unreadable(section, f"no {key}" if not found else f"more than one {key}")
    return found[0]


def _pairs(section: Section, key: str) -> dict[str, str]:
    """The lines that begin with the word `key` as first word -> rest."""
    return {name: rest for name, _, rest in (line.partition(" ") for line in _values(section, key))}


def _number(section: Section, key: str) -> float:
    """The first word after `key` as a number that is not negative."""
    text = _value(section, key).split(" ")[0]
    if re.fullmatch(r"\d{1,18}(\.\d{1,9})?", text) is None:
        raise _unreadable(section, f"{key} is no number: {text[:40]!r}")
    return float(text)


def _limit(section: Section, key: str) -> float:
    return math.inf if _value(section, key) == "unlimited" else _number(section, key)


def _filesystem(section: Section, key: str) -> Filesystem:
    match = re.fullmatch(r"(\d{1,12}) (\d{1,18}) (\d{1,18}) (\d{1,20}) (\d{1,20}) (.+)", _value(section, key))
    if match is None or int(match[1]) == 0:
        raise _unreadable(section, f"no figures of {key}")
    block, size, free, inodes, inodes_free = (int(match[at]) for at in range(1, 6))
    return Filesystem(block * size, block * free, inodes, inodes_free, match[6])


def _age(section: Section, started_ticks: int) -> float:
    ticks = _number(section, "ticks")
    return max(0.0, _number(section, "uptime") - started_ticks / ticks) if ticks else 0.0


def _assignments(lines: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _json(section: Section, key: str) -> Any:
    try:
        return json.loads(_value(section, key))
    except json.JSONDecodeError as error:
        raise _unreadable(section, f"{key} is no JSON") from error
