"""Group `host`: the machine itself, without GPUs and networks: room and limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.checks.finding import GIB, Check, Finding, gib
from cluster.checks.group import CheckGroup, known
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Filesystem, python_question

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


GROUP = CheckGroup(
    "host",
    (check_disk, check_shm, check_memlock, check_nofile, check_memory_free),
    questions=(SYSTEM,),
    compare=_compare,
    compared={"host.memory": "The same main memory on all nodes, within 3%: a module may have failed."},
)
