"""Group `host`: the machine itself, without GPUs and networks: room, limits and what runs on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import GIB, Check, Finding, Verdict, gib
from cluster.checks.group import CheckGroup
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Section, listed
from cluster.survey.sysfs import Filesystem, python_question

# Free bytes: below the first a run cannot work, below the second it may soon not.
DISK_FREE_BYTES = {"/": (1 * GIB, 10 * GIB), "/tmp": (GIB // 2, 5 * GIB)}
# 64 MiB is what containers get by default: less than one pair of ranks and a data loader take.
SHM_FREE_BYTES = ((64 << 20) + 1, GIB)
INODES_FREE_SHARE = 0.01
MEMORY_FREE_SHARE = (0.05, 0.20)
# Sockets and files of eight ranks with their data loaders on many nodes; 1024 is what sessions often get.
NOFILE = (1024, 8192)
_NAMED = 5

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
    "locked": limits["Max locked memory"][0],
    "files": ["unlimited" if one < 0 else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)],
    "memory": [int(memory[name].strip().replace(" kB", "")) * 1024 for name in ("MemTotal", "MemAvailable")],
    "rooms": {"/": room("/"), "/tmp": room(os.environ.get("TMPDIR") or "/tmp")},
    "shm": room(shm) if shm.is_dir() else None,
}
print(json.dumps(told))
""",
)

RUNS = python_question(
    "host.runs",
    20,
    r"""
# Processes with BURST_RUN_ID in their environment, which a zombie has not. Only root may read those of other users.
import pwd

read, unread, runs = 0, 0, []
for folder in own("proc/1/environ").parent.parent.glob("[0-9]*"):
    try:
        environ = (folder / "environ").read_bytes().split(b"\0")
        marks = dict(one.partition(b"=")[::2] for one in environ if one.startswith(b"BURST_"))
        names = (b"BURST_RUN_ID", b"BURST_NODE")
        run_id, node = (marks.get(name, b"")[:100].decode(errors="replace") for name in names)
        read += 1
        if run_id:
            runs.append([int(folder.name), pwd.getpwuid(folder.stat().st_uid).pw_name, run_id, node])
    except PermissionError:
        unread += 1
    except KeyError:
        runs.append([int(folder.name), "an unknown user", run_id, node])
    except OSError:
        pass  # it has ended meanwhile
print(json.dumps({"read": read, "unread": unread, "runs": sorted(runs)}))
""",
)


@dataclass(frozen=True)
class System:
    """What a session finds. adapters: for RDMA. locked_bytes, files (soft, hard): its limits, may be infinite. shm:
    None where there is no /dev/shm."""

    adapters: int
    locked_bytes: float
    files: tuple[float, float]
    memory_bytes: int
    available_bytes: int
    rooms: dict[str, Filesystem]
    shm: Filesystem | None


def read_system(facts: NodeFacts) -> System:
    """Raises UnreadableError."""

    def limit(told: Any) -> float:
        return math.inf if told == "unlimited" else int(told)

    def take(told: Any) -> System:
        (soft, hard), (total, available) = told["files"], told["memory"]
        if int(total) <= 0:
            raise ValueError("no memory")
        rooms = {place: Filesystem.of(told["rooms"][place]) for place in DISK_FREE_BYTES}
        shm = None if told["shm"] is None else Filesystem.of(told["shm"])
        limits = limit(told["locked"]), (limit(soft), limit(hard))
        return System(int(told["adapters"]), *limits, int(total), int(available), rooms, shm)

    return facts.section(SYSTEM).read(take)


def judge_room(check: Check, room: Filesystem, limits: tuple[float, float]) -> Finding:
    """Whether enough bytes and inodes are free there."""
    remedy = f"free space on {check.device}, or put it on a larger disk"
    if room.inodes and room.inodes_free < INODES_FREE_SHARE * room.inodes:
        return check.expecting("inodes").fail(f"{room.inodes_free} of {room.inodes} inodes free", remedy)
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)} ({room.kind})"
    return check.expecting(f"at least {gib(limits[1])} free").above(room.free_bytes, limits, text, remedy)


def check_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space on the root file system and for temporary files, and inodes, without which no file can be made."""
    return [
        judge_room(check.on(place), room, DISK_FREE_BYTES[place]) for place, room in read_system(facts).rooms.items()
    ]


def check_shm(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space in /dev/shm, through which ranks of a node talk."""
    check, room = (
        check.on("/dev/shm").expecting(f"a tmpfs with at least {gib(SHM_FREE_BYTES[1])} free"),
        read_system(facts).shm,
    )
    remedy = "mount a larger tmpfs there (containers: --ipc host or --shm-size), or remove what runs left in it"
    if room is None:
        return [check.fail("not there: NCCL and data loaders need it", remedy)]
    if room.kind not in ("tmpfs", "ramfs"):
        return [check.warn(f"on a disk ({room.kind}), not in memory", remedy)]
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)}"
    return [check.above(room.free_bytes, SHM_FREE_BYTES, text, remedy)]


def check_memlock(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much memory a session may lock; RDMA needs all of it."""
    system, check = read_system(facts), check.expecting("unlimited where RDMA adapters are")
    if math.isinf(system.locked_bytes):
        return [check.ok("unlimited")]
    text = f"{gib(system.locked_bytes)} for a session"
    if facts.in_containers or not system.adapters:
        return [
            check.ok(f"{text}; {'containers get their own' if facts.in_containers else 'no RDMA adapter needs it'}")
        ]
    remedy = "set `* - memlock unlimited` in /etc/security/limits.d and LimitMEMLOCK=infinity for sshd"
    return [check.fail(f"{text}, and {system.adapters} RDMA adapters must lock what they send", remedy)]


def check_nofile(check: Check, facts: NodeFacts) -> list[Finding]:
    """How many files a session may open."""
    soft, hard = read_system(facts).files
    check, text = check.expecting(f"at least {NOFILE[1]}"), f"{soft:g} open files, at most {hard:g}"
    remedy = "set `* - nofile 1048576` in /etc/security/limits.d"
    return [check.fail(text, remedy) if hard < NOFILE[0] else check.above(soft, (0, NOFILE[1]), text, remedy)]


def check_memory_free(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much main memory is free: what else sits there."""
    system = read_system(facts)
    share = system.available_bytes / system.memory_bytes
    text = f"{gib(system.available_bytes)} ({share:.0%}) available of {gib(system.memory_bytes)}"
    check = check.expecting(f"at least {MEMORY_FREE_SHARE[1]:.0%} free")
    return [check.above(share, MEMORY_FREE_SHARE, text, "look with `top -o %MEM` on the node for what holds it")]


@dataclass(frozen=True)
class Process:
    """One process of a run. node: as the run calls this machine, which may have several names, or be several nodes of a
    rehearsal."""

    pid: int
    owner: str
    run_id: str
    node: str


def check_runs(check: Check, facts: NodeFacts) -> list[Finding]:
    """Processes of earlier runs of ours that are still there."""
    check = check.expecting("no run is under way")
    processes, unread = read_runs(facts.section(RUNS))
    if not processes:
        return [check.ok(f"none, but {unread} processes may not be looked into" if unread else "none")]
    runs = sorted({process.run_id for process in processes})
    return [_run(check.on(run), [one for one in processes if one.run_id == run]) for run in runs]


def _run(check: Check, processes: Sequence[Process]) -> Finding:
    owners, count = ", ".join(sorted({process.owner for process in processes})), len(processes)
    shown = ", ".join(str(one.pid) for one in processes[:_NAMED])
    shown += f" and {count - _NAMED} more" if count > _NAMED else ""
    remedy = f"wait for the run's end, or end it with `burst cancel {check.device}`; else kill these processes"
    is_here = any(process.node == check.node for process in processes)
    text = f"{count} {'process' if count == 1 else 'processes'} of {owners}: {shown}"
    return check.finding(Verdict.FAIL if is_here else Verdict.WARN, text, remedy)


def read_runs(section: Section) -> tuple[list[Process], int]:
    """(processes with BURST_RUN_ID in their environment, processes that could not be looked into)."""

    def take(told: Any) -> tuple[list[Process], int]:
        if int(told["read"]) + int(told["unread"]) <= 0:
            raise ValueError("not one process was seen")
        rows = [(int(pid), [one_line(word, 100) for word in words]) for pid, *words in listed(told["runs"])]
        return [Process(pid, owner, run_id, node) for pid, (owner, run_id, node) in rows], int(told["unread"])

    return section.read(take)


GROUP = CheckGroup("host", (check_disk, check_shm, check_memlock, check_nofile, check_memory_free), questions=(SYSTEM,))
OWN_RUNS = CheckGroup("host", (check_runs,), questions=(RUNS,))
