"""Group `host`: the machine itself, without GPUs and networks: what is installed for ranks (Python and its packages),
room, limits, settings that lie around.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.check import GIB, Check, CheckGroup, Finding, gib, known
from cluster.env.live import LIVE, live_sources, reaching_ranks
from cluster.remote_text import plain_path
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Filesystem, Question, fill, python_question
from engine.config.cluster import ClusterConfig

VERSIONS = "host.versions"
OLDEST_PYTHON = (3, 11)  # of ranks
OLDEST_NODE_PYTHON = (3, 9)  # of what supervises them

SOFTWARE = Question(
    "host.software",
    15,
    r"""
python=${BURST_PYTHON:-python3}
case $python in "~/"*) python=$HOME/${python#"~/"} ;; esac
python=$(command -v "$python" 2>/dev/null) || { echo null; exit 0; }
# What ran here is what ranks are started with: behind a wrapper, sys.executable is another program.
BURST_EXECUTABLE=$python
export BURST_EXECUTABLE
# The versions are in the packages' metadata: importing torch would take seconds.
"$python" - <<'PYTHON' 2>/dev/null
import json, os, sys
from importlib.metadata import distributions, version
from importlib.util import find_spec

def tell(name):
    # None: not there; "": there, and does not say.
    try:
        return version(name)
    except Exception:
        return "" if find_spec(name) else None

names = (os.environ.get("BURST_MODULES") or "torch").split()
packages = (one.metadata["Name"] or "" for one in distributions())
nccl = [name for name in packages if name.lower().replace("_", "-").startswith("nvidia-nccl-cu")]
told = {"python": "%d.%d.%d" % sys.version_info[:3], "executable": os.environ["BURST_EXECUTABLE"]}
print(json.dumps(dict(told, modules={name: tell(name) for name in names}, nccl=version(nccl[0]) if nccl else None)))
PYTHON
""",
)


@dataclass(frozen=True)
class Software:
    """The Python of the ranks.

    executable: the command that was run, which may be a wrapper. modules: version by name, "" if it does not say; None:
    not installed. nccl: of the package that PyTorch wheels bring.
    """

    python: str
    executable: str
    modules: Mapping[str, str | None]
    nccl: str | None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", self.python):
            raise ValueError("no version of Python")

    @property
    def version(self) -> tuple[int, ...]:
        """(3, 11, 2)."""
        return tuple(map(int, self.python.split(".")))


def read_software(facts: NodeFacts) -> Software | None:
    """None where there is no such Python. Raises UnreadableError."""

    def take(told: Any) -> Software | None:
        if told is None:
            return None
        software: Software = fill(Software, {**told, "executable": plain_path(told["executable"])})
        return software

    return facts.section(SOFTWARE).read(take)


def check_python(check: Check, facts: NodeFacts) -> list[Finding]:
    """Python on the node can run ranks, is new enough and has what they import; where they run in containers, it is
    new enough for what supervises them."""
    software, name = read_software(facts), facts.config.python or "python3"
    oldest = ".".join(map(str, OLDEST_NODE_PYTHON if facts.in_containers else OLDEST_PYTHON))
    remedy = "set cluster.python to one, or use cluster.container.runtime=docker"
    check = check.expecting(f"Python {oldest} or newer")
    if facts.in_containers:
        remedy = f"install Python {oldest} or newer as python3: it supervises ranks"
    if software is None:
        return [check.fail(f"cannot run {name}", remedy)]
    text = f"{software.executable} is Python {software.python}"
    if software.version < OLDEST_NODE_PYTHON:
        return [check.fail(text, remedy)]
    if facts.in_containers:
        return [check.ok(software.python)]
    if software.version < OLDEST_PYTHON:
        return [check.warn(text, remedy)]
    missing = ", ".join(name for name, version in software.modules.items() if version is None)
    if missing:
        remedy = "install it there, or set cluster.python to one that has it"
        return [check.expecting("").warn(f"{software.executable} has no {missing}", remedy)]
    return [check.ok(software.python)]


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have alike: where ranks run in containers, nothing of Python, for the image has its own."""
    software = None if facts.in_containers else known(read_software, facts)
    return {} if software is None else {VERSIONS: _versions(software)}


def _versions(software: Software) -> str:
    """`Python 3.11, torch 2.13.0, NCCL 2.29.3`; the last figure of Python's version harms nobody."""
    found = {"torch": software.modules.get("torch"), "NCCL": software.nccl}
    said = (f"{name} {version}" for name, version in found.items() if version)
    return ", ".join((f"Python {software.version[0]}.{software.version[1]}", *said))


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    return {"BURST_PYTHON": config.python if config.container.runtime == "bare" else None}


# --- room, limits, settings -------------------------------------------------------------------------------------------


# Free bytes: below the first a run cannot work, below the second it may soon not.
DISK_FREE_BYTES = {"/": (1 * GIB, 10 * GIB), "/tmp": (GIB // 2, 5 * GIB)}
# 64 MiB is what containers get by default: less than one pair of ranks and a data loader take.
SHM_FREE_BYTES = ((64 << 20) + 1, GIB)
INODES_FREE_SHARE = 0.01
MEMORY_FREE_SHARE = (0.05, 0.20)
MEMORY_TOLERANCE = 0.03
# Sockets and files of eight ranks with their data loaders on many nodes; 1024 is what sessions often get.
NOFILE = (1024, 8192)

SYSTEM = python_question(
    "host.system",
    10,
    r"""
import resource

# Of this very session: what a command over SSH may use, which is what a launch gets. What may be locked is read from
# /proc, where a rehearsal tree can say what a testbed cannot be.
limits = dict((line[:26].strip(), line[26:].split()) for line in lines(own("proc/self/limits")))
memory = dict(line.split(":", 1) for line in lines(own("proc/meminfo")))
shm = own("dev/shm")
told = {
    "adapters": len(list(root.glob("sys/class/infiniband/*"))),
    "locked": int(limits["Max locked memory"][0].replace("unlimited", "-1")),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "memory": [int(memory[name].strip().replace(" kB", "")) * 1024 for name in ("MemTotal", "MemAvailable")],
    "root": room("/"),
    "tmp": room(os.environ.get("TMPDIR") or "/tmp"),
    "shm": room(shm) if shm.is_dir() else None,
}
print(json.dumps(told))
""",
)


@dataclass(frozen=True)
class System:
    """What a session finds. adapters: for RDMA. locked: bytes that it may lock, files (soft, hard) that it may open; -1
    is without limit. memory: bytes, in all and available. shm: None where there is no /dev/shm."""

    adapters: int
    locked: int
    files: tuple[int, int]
    memory: tuple[int, int]
    root: Filesystem
    tmp: Filesystem
    shm: Filesystem | None

    def __post_init__(self) -> None:
        if self.memory[0] <= 0:
            raise ValueError("no memory")


def read_system(facts: NodeFacts) -> System:
    """Raises UnreadableError."""
    return facts.section(SYSTEM).read(System)


def judge_room(check: Check, room: Filesystem, limits: tuple[float, float]) -> Finding:
    """Whether enough bytes and inodes are free there."""
    remedy = f"free space on {check.device}, or put it on a larger disk"
    if room.inodes and room.inodes_free < INODES_FREE_SHARE * room.inodes:
        remedy = "remove folders with very many small files, such as old caches and environments"
        check = check.expecting(f"{INODES_FREE_SHARE:.0%} of the inodes free")
        return check.fail(f"{room.inodes_free} of {room.inodes} inodes free", remedy)
    text = f"{gib(room.free)} free of {gib(room.size)} ({room.kind})"
    return check.expecting(f"at least {gib(limits[1])} free").above(room.free, limits, text, remedy)


def check_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space on the root file system and for temporary files, and inodes, without which no file can be made."""
    system = read_system(facts)
    rooms = {"/": system.root, "/tmp": system.tmp}
    return [judge_room(check.on(place), room, DISK_FREE_BYTES[place]) for place, room in rooms.items()]


def check_shm(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space in /dev/shm, through which ranks of a node talk."""
    check = check.on("/dev/shm").expecting(f"a tmpfs with at least {gib(SHM_FREE_BYTES[1])} free")
    room = read_system(facts).shm
    remedy = "mount a larger tmpfs there (containers: --ipc host or --shm-size), or remove what runs left in it"
    if room is None:
        return [check.fail("not there: NCCL and data loaders need it", remedy)]
    if room.kind not in ("tmpfs", "ramfs"):
        return [check.warn(f"on a disk ({room.kind}), not in memory", remedy)]
    text = f"{gib(room.free)} free of {gib(room.size)}"
    return [check.above(room.free, SHM_FREE_BYTES, text, remedy)]


def check_memlock(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much memory a session may lock; RDMA needs all of it."""
    system, check = read_system(facts), check.expecting("unlimited where RDMA adapters are")
    if system.locked < 0:
        return [check.ok("unlimited")]
    text = f"{gib(system.locked)} for a session"
    if facts.in_containers:
        return [check.ok(f"{text}; containers get their own")]
    if not system.adapters:
        return [check.ok(f"{text}; no RDMA adapter needs it")]
    remedy = "set `* - memlock unlimited` in /etc/security/limits.d and LimitMEMLOCK=infinity for sshd"
    return [check.fail(f"{text}, and {system.adapters} RDMA adapters must lock what they send", remedy)]


def check_nofile(check: Check, facts: NodeFacts) -> list[Finding]:
    """How many files a session may open."""
    soft, hard = (math.inf if one < 0 else one for one in read_system(facts).files)
    check, text = check.expecting(f"at least {NOFILE[1]}"), f"{soft:g} open files, at most {hard:g}"
    remedy = "set `* - nofile 1048576` in /etc/security/limits.d"
    return [check.fail(text, remedy) if hard < NOFILE[0] else check.above(soft, (0, NOFILE[1]), text, remedy)]


def check_memory_free(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much main memory is free: what else sits there."""
    total, available = read_system(facts).memory
    share = available / total
    text = f"{gib(available)} ({share:.0%}) available of {gib(total)}"
    check = check.expecting(f"at least {MEMORY_FREE_SHARE[1]:.0%} free")
    return [check.above(share, MEMORY_FREE_SHARE, text, "look with `top -o %MEM` on the node for what holds it")]


def _compare(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """Kernels and firmware keep a little memory back, and not the same on equal machines: a tolerance, and no trait."""
    told = {node: system.memory[0] for node, facts in nodes.items() if (system := known(read_system, facts))}
    usual = statistics.median(told.values()) if told else 0.0

    def judge(check: Check, total: int | None) -> Finding:
        if total is None:
            return check.unknown("the node did not tell how much memory it has", "run the check again")
        if abs(total - usual) <= MEMORY_TOLERANCE * usual:
            return check.ok(gib(total))
        remedy = "a module may be missing or switched off: `dmidecode -t memory`"
        return check.expecting(f"{gib(usual)}, as other nodes have").warn(gib(total), remedy)

    return [judge(Check(node, "host.memory"), told.get(node)) for node in nodes]


# Left behind after debugging, each of these makes a run slow without a word.
CRIPPLING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_IGNORE_NET_MISMATCH": "1",
    "NCCL_DEBUG": "TRACE",
}


def check_nccl_conf(check: Check, facts: NodeFacts) -> list[Finding]:
    """No setting of NCCL that lies around (/etc/nccl.conf, ~/.nccl.conf, the session) switches a fast path off. Ranks
    in containers see none of these but files in cluster.container.mounts; see host.image_nccl."""
    sources = reaching_ranks(facts.section(LIVE).read(live_sources), facts.config.container)
    bad = {
        f"{name}={value} ({source.place})": name
        for source in sources
        for name, value in sorted(source.values.items())
        if not source.is_process and CRIPPLING.get(name) == value.strip()
    }
    if facts.in_containers and not sources:
        return [check.skip("ranks run in containers, where settings of the node do not count")]
    if not bad:
        return [check.ok("none")]
    names = ", ".join(dict.fromkeys(bad.values()))
    return [check.expecting("none").warn(", ".join(bad), f"remove {names}, or know why it is there")]


GROUPS = (
    CheckGroup(
        "host",
        (check_python,),
        questions=(SOFTWARE,),
        settings=_settings,
        traits=_traits,
        compared={VERSIONS: "Ranks run with the same on all nodes: Python, PyTorch and NCCL, or the image."},
    ),
    CheckGroup(
        "host",
        (check_disk, check_shm, check_memlock, check_nofile, check_memory_free, check_nccl_conf),
        questions=(SYSTEM, LIVE),
        compare=_compare,
        compared={"host.memory": "The same main memory on all nodes, within 3%: a module may have failed."},
    ),
)
