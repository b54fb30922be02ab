"""Group `host`: the machine itself, without GPUs and networks: room, limits and what runs on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import GIB, Check, Finding, Verdict, age, gib
from cluster.checks.group import CheckGroup, known
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Section, listed
from cluster.survey.sysfs import Filesystem, python_question

# Free bytes: below the first a run cannot work, below the second it may soon not.
DISK_FREE_BYTES = {"/": (1 * GIB, 10 * GIB), "/tmp": (GIB // 2, 5 * GIB)}
# 64 MiB is what containers get by default: less than one pair of ranks and a data loader take.
SHM_FREE_BYTES = ((64 << 20) + 1, GIB)
INODES_FREE_SHARE = (0.01, 0.05)
MEMORY_FREE_SHARE = (0.05, 0.20)
MEMORY_TOLERANCE = 0.03
# Sockets and files of eight ranks with their data loaders on many nodes; 1024 is what sessions often get.
NOFILE = (1024, 8192)
_NAMED = 5

SYSTEM = python_question(
    "host.system",
    5,
    r"""
import resource

# Of this very session: what a command over SSH may use, which is what a launch gets. What may be locked is read from
# /proc, where a rehearsal tree can say what a testbed cannot be.
limits = dict((line[:26].strip(), line[26:].split()) for line in lines(own("proc/self/limits")))
memory = dict(line.split(":", 1) for line in lines(own("proc/meminfo")))
told = {
    "adapters": len(list(root.glob("sys/class/infiniband/*"))),
    "locked": limits["Max locked memory"][0],
    "files": ["unlimited" if one < 0 else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)],
    "memory": [int(memory[name].strip().replace(" kB", "")) * 1024 for name in ("MemTotal", "MemAvailable")],
}
print(json.dumps(told))
""",
)

DISK = python_question(
    "host.disk",
    10,
    r"""
shm = own("dev/shm")
told = {"/": room("/"), "/tmp": room(os.environ.get("TMPDIR") or "/tmp")}
print(json.dumps(dict(told, shm=room(shm) if shm.is_dir() else None)))
""",
)

RUNS = python_question(
    "host.runs",
    20,
    r"""
# Processes with BURST_RUN_ID in their environment. Only root may read the environment of other users' processes.
import pwd

proc = own("proc/1/environ").parent.parent
uptime_s = float((proc / "uptime").read_text().split()[0])
read, unread, runs = 0, 0, []
for folder in proc.glob("[0-9]*"):
    try:
        environ = (folder / "environ").read_bytes().split(b"\0")
        read += 1
        marks = dict(one.partition(b"=")[::2] for one in environ if one.startswith((b"BURST_RUN_ID=", b"BURST_NODE=")))
        found = (marks.get(name, b"")[:100] for name in (b"BURST_RUN_ID", b"BURST_NODE"))
        run_id, node = (one.decode(errors="replace") for one in found)
        if not run_id:
            continue
        # The name, in brackets, may hold blanks and brackets itself.
        name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        age_s = uptime_s - int(rest.split()[19]) / os.sysconf("SC_CLK_TCK")
        uid = folder.stat().st_uid
        try:
            owner = pwd.getpwuid(uid).pw_name
        except KeyError:
            owner = "uid %d" % uid
        if rest.split()[0] != "Z":
            runs.append([int(folder.name), owner, max(0.0, age_s), name, run_id, node])
    except PermissionError:
        unread += 1
    except OSError:
        pass  # it has ended meanwhile
print(json.dumps({"read": read, "unread": unread, "runs": sorted(runs)}))
""",
)


@dataclass(frozen=True)
class System:
    """What a session finds. adapters: for RDMA. locked_bytes, files (soft, hard): its limits, may be infinite."""

    adapters: int
    locked_bytes: float
    files: tuple[float, float]
    memory_bytes: int
    available_bytes: int


def read_system(facts: NodeFacts) -> System:
    """Raises UnreadableError."""

    def limit(told: Any) -> float:
        return math.inf if told == "unlimited" else int(told)

    def take(told: Any) -> System:
        (soft, hard), (total, available) = told["files"], told["memory"]
        if int(total) <= 0:
            raise ValueError("no memory")
        limits = limit(told["locked"]), (limit(soft), limit(hard))
        return System(int(told["adapters"]), *limits, int(total), int(available))

    return facts.section(SYSTEM).read(take)


def judge_room(check: Check, room: Filesystem, limits: tuple[float, float]) -> Finding:
    """Whether enough bytes are free there."""
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)} ({room.kind})"
    remedy = f"free space on {check.device}, or put it on a larger disk"
    return check.expecting(f"at least {gib(limits[1])} free").above(room.free_bytes, limits, text, remedy)


def _disks(facts: NodeFacts) -> dict[str, Filesystem]:
    """The file systems of DISK_FREE_BYTES. Raises UnreadableError."""
    return facts.section(DISK).read(lambda told: {place: Filesystem.of(told[place]) for place in DISK_FREE_BYTES})


def check_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space on the root file system and for temporary files."""
    return [judge_room(check.on(place), room, DISK_FREE_BYTES[place]) for place, room in _disks(facts).items()]


def check_inodes(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free inodes: without them no file can be made, whatever space there is."""
    check = check.expecting("at least 5% free")
    return [_inodes(check.on(place), room) for place, room in _disks(facts).items()]


def _inodes(check: Check, room: Filesystem) -> Finding:
    if room.inodes == 0:
        return check.ok(f"made as needed ({room.kind})")
    share = room.inodes_free / room.inodes
    remedy = "remove folders with very many small files, such as old caches and environments"
    return check.above(share, INODES_FREE_SHARE, f"{share:.0%} of {room.inodes} free", remedy)


def check_shm(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space in /dev/shm, through which ranks of a node talk."""
    check = check.on("/dev/shm").expecting(f"a tmpfs with at least {gib(SHM_FREE_BYTES[1])} free")
    room = facts.section(DISK).read(lambda told: Filesystem.of(told["shm"]) if told["shm"] is not None else None)
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
    if facts.in_containers:
        return [check.ok(f"{text}; containers get a limit of their own")]
    remedy = "set `* - memlock unlimited` in /etc/security/limits.d and LimitMEMLOCK=infinity for sshd"
    if system.adapters:
        return [check.fail(f"{text}, and {system.adapters} RDMA adapters must lock what they send", remedy)]
    return [check.ok(f"{text}; only RDMA adapters need more, and there is none")]


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
    """One process of a run. owner: a user name or `uid 1000`. name: as it calls itself, whatever that is. node: as the
    run calls this machine, which may have several names, or be several nodes of a rehearsal."""

    pid: int
    owner: str
    age_s: float
    name: str
    run_id: str
    node: str


def check_runs(check: Check, facts: NodeFacts) -> list[Finding]:
    """Processes of earlier runs of ours that are still there."""
    check = check.expecting("no run is under way")
    processes, unread = read_runs(facts.section(RUNS))
    if not processes:
        return [check.ok(f"none, but {unread} processes may not be looked into" if unread else "none")]
    runs = sorted({process.run_id for process in processes})
    return [_run(check.on(one_line(run, 100)), [one for one in processes if one.run_id == run]) for run in runs]


def _run(check: Check, processes: Sequence[Process]) -> Finding:
    owners = ", ".join(sorted({process.owner for process in processes}))
    many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    oldest = sorted(processes, key=lambda one: -one.age_s)[:_NAMED]
    shown = ", ".join(f"{one.pid} {one_line(one.name, 40) or '(no name)'} ({age(one.age_s)})" for one in oldest)
    shown += f" and {len(processes) - _NAMED} more" if len(processes) > _NAMED else ""
    remedy = f"wait for the run's end, or end it with `burst cancel {check.device}`; else kill these processes"
    is_here = any(process.node == check.node for process in processes)
    return check.finding(Verdict.FAIL if is_here else Verdict.WARN, f"{many} of {owners}: {shown}", remedy)


def read_runs(section: Section) -> tuple[list[Process], int]:
    """(processes with BURST_RUN_ID in their environment, processes that could not be looked into)."""

    def take(told: Any) -> tuple[list[Process], int]:
        if int(told["read"]) + int(told["unread"]) <= 0:
            raise ValueError("not one process was seen")
        rows = [
            Process(int(pid), str(owner), float(age_s), str(name), str(run), str(node))
            for pid, owner, age_s, name, run, node in listed(told["runs"])
        ]
        return rows, int(told["unread"])

    return section.read(take)


def compare_memory(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """host.memory: UNKNOWN for a node that did not tell.

    Kernels and firmware keep a little back, and not the same on equal machines: hence a tolerance, and no trait.
    """
    systems = {node: known(read_system, facts) for node, facts in nodes.items()}
    totals = {node: None if system is None else system.memory_bytes for node, system in systems.items()}
    told = [total for total in totals.values() if total is not None]
    usual = statistics.median(told) if told else 0.0
    expected = f"{gib(usual)} within {MEMORY_TOLERANCE:.0%}" if len(told) > 1 else ""
    return [_memory(Check(node, "host.memory", expected), total, usual) for node, total in totals.items()]


def _memory(check: Check, total: int | None, usual: float) -> Finding:
    if total is None:
        return check.unknown("the node did not tell how much memory it has", "run the check again")
    if abs(total - usual) > MEMORY_TOLERANCE * usual:
        remedy = "a module may be missing or switched off: `dmidecode -t memory`"
        return check.warn(f"{gib(total)}, the usual node has {gib(usual)}", remedy)
    return check.ok(gib(total))


GROUP = CheckGroup(
    "host",
    (check_disk, check_inodes, check_shm, check_memlock, check_nofile, check_memory_free),
    questions=(SYSTEM, DISK),
    compare=compare_memory,
    compared={"host.memory": "The same main memory on all nodes, within 3%: a module may have failed."},
)
OWN_RUNS = CheckGroup("host", (check_runs,), questions=(RUNS,))
