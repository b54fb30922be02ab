"""Group `host`: the machine itself, without GPUs and networks: room, limits and what runs on it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.checks.finding import GIB, Check, Finding, age, gib
from cluster.checks.group import CheckGroup, known
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.lines import Answer, Filesystem
from cluster.survey.section import Question
from cluster.survey.sysfs import python_question

T = TypeVar("T")
# Free bytes: below the first a run cannot work, below the second it may soon not.
DISK_FREE_BYTES = {"root": ("/", (1 * GIB, 10 * GIB)), "tmp": ("/tmp", (GIB // 2, 5 * GIB))}
# 64 MiB is what containers get by default: less than one pair of ranks and a data loader take.
SHM_FREE_BYTES = ((64 << 20) + 1, GIB)
INODES_FREE_SHARE = (0.01, 0.05)
MEMORY_FREE_SHARE = (0.05, 0.20)
MEMORY_TOLERANCE = 0.03
# Sockets and files of eight ranks with their data loaders on many nodes; 1024 is what sessions often get.
NOFILE = (1024, 8192)
_NAMED = 5

LIMITS = Question(
    "host.limits",
    5,
    r"""
# Of this very session: what a command over SSH may use, which is what a launch gets.
# The adapters come first: an answer that was cut off does not look as if there were none.
for device in "$root"/sys/class/infiniband/*; do
    [ -e "$device" ] && printf 'rdma %s\n' "${device##*/}"
done
# In KiB, as `ulimit -l` has it; from /proc, where a rehearsal tree can say what a testbed cannot be.
limits=$root/proc/self/limits
[ -r "$limits" ] || limits=/proc/self/limits
printf 'nofile_soft %s\n' "$(ulimit -Sn)"
printf 'nofile_hard %s\n' "$(ulimit -Hn)"
printf 'memlock %s\n' "$(awk '/^Max locked memory/ { print ($4 == "unlimited") ? $4 : int($4 / 1024) }' "$limits")"
exit 0
""",
)

DISK = Question(
    "host.disk",
    10,
    r"""
command -v stat >/dev/null 2>&1 || exit 127
filesystem() { stat -f -c "$1 %S %b %a %c %d %T" "$2"; }
filesystem root /
filesystem tmp "${TMPDIR:-/tmp}"
shm=/dev/shm
[ -d "$root$shm" ] && shm=$root$shm
if [ -d "$shm" ]; then filesystem shm "$shm"; else echo 'absent shm'; fi
exit 0
""",
)

MEMORY = Question(
    "host.memory",
    5,
    r"""
file=$root/proc/meminfo
[ -e "$file" ] || file=/proc/meminfo
while read -r key value unit; do
    case $key in MemTotal:|MemAvailable:|SwapTotal:|SwapFree:) printf '%s %s %s\n' "$key" "$value" "$unit" ;; esac
done <"$file"
""",
)

RUNS = python_question(
    "host.runs",
    20,
    r"""
# Processes with BURST_RUN_ID in their environment. Only root may read the environment of other users' processes.
import pwd

proc = root / "proc" if (root / "proc/1/stat").exists() else pathlib.Path("/proc")
uptime_s = float((proc / "uptime").read_text().split()[0])
read, unread, runs = 0, 0, []
for folder in proc.glob("[0-9]*"):
    try:
        environ = (folder / "environ").read_bytes().split(b"\0")
        read += 1
        run_id = next((one[13:113].decode(errors="replace") for one in environ if one[:13] == b"BURST_RUN_ID="), "")
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
            runs.append([int(folder.name), owner, max(0.0, age_s), name, run_id])
    except PermissionError:
        unread += 1
    except OSError:
        pass  # it has ended meanwhile
print(json.dumps({"read": read, "unread": unread, "runs": sorted(runs)}))
""",
)


def judge_room(check: Check, room: Filesystem | None, limits: tuple[float, float]) -> Finding:
    """Whether enough bytes are free there."""
    if room is None:
        return check.unknown("not there")
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)} ({room.kind})"
    remedy = f"free space on {check.device}, or put it on a larger disk"
    return check.expecting(f"at least {gib(limits[1])} free").above(room.free_bytes, limits, text, remedy)


def check_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space on the root file system and for temporary files."""
    answer, found = facts.answer(DISK), []
    for name, (place, limits) in DISK_FREE_BYTES.items():
        found.append(judge_room(check.on(place), answer.filesystem(name), limits))
    return found


def check_inodes(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free inodes: without them no file can be made, whatever space there is."""
    answer, check = facts.answer(DISK), check.expecting("at least 5% free")
    return [_inodes(check.on(place), answer.filesystem(name)) for name, (place, _) in DISK_FREE_BYTES.items()]


def _inodes(check: Check, room: Filesystem | None) -> Finding:
    if room is None:
        return check.unknown("not there")
    if room.inodes == 0:
        return check.ok(f"made as needed ({room.kind})")
    share = room.inodes_free / room.inodes
    remedy = "remove folders with very many small files, such as old caches and environments"
    return check.above(share, INODES_FREE_SHARE, f"{share:.0%} of {room.inodes} free", remedy)


def check_shm(check: Check, facts: NodeFacts) -> list[Finding]:
    """Free space in /dev/shm, through which ranks of a node talk."""
    check = check.on("/dev/shm").expecting(f"a tmpfs with at least {gib(SHM_FREE_BYTES[1])} free")
    room = facts.answer(DISK).filesystem("shm")
    remedy = "mount a larger tmpfs there (containers: --ipc host or --shm-size), or remove what runs left in it"
    if room is None:
        return [check.fail("not there: NCCL and data loaders need it", remedy)]
    if room.kind not in ("tmpfs", "ramfs"):
        return [check.warn(f"on a disk ({room.kind}), not in memory", remedy)]
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)}"
    return [check.above(room.free_bytes, SHM_FREE_BYTES, text, remedy)]


def check_memlock(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much memory a session may lock; RDMA needs all of it."""
    answer, check = facts.answer(LIMITS), check.expecting("unlimited where RDMA adapters are")
    locked_kib, adapters = answer.number("memlock", math.inf), len(answer.values("rdma"))
    if math.isinf(locked_kib):
        return [check.ok("unlimited")]
    text = f"{gib(locked_kib * 1024)} in an SSH session"
    if facts.in_containers:
        return [check.ok(f"{text}; containers get a limit of their own")]
    remedy = "set `* - memlock unlimited` in /etc/security/limits.d and LimitMEMLOCK=infinity for sshd"
    if adapters:
        return [check.fail(f"{text}, and {adapters} RDMA adapters must lock what they send", remedy)]
    return [check.ok(f"{text}; only RDMA adapters need more, and there is none")]


def check_nofile(check: Check, facts: NodeFacts) -> list[Finding]:
    """How many files a session may open."""
    answer = facts.answer(LIMITS)
    answer.number("memlock", math.inf)  # of an answer that was cut off nothing is believed
    soft, hard = (answer.number(name, math.inf) for name in ("nofile_soft", "nofile_hard"))
    check, text = check.expecting(f"at least {NOFILE[1]}"), f"{soft:g} open files, at most {hard:g}"
    remedy = "set `* - nofile 1048576` in /etc/security/limits.d"
    return [check.fail(text, remedy) if hard < NOFILE[0] else check.above(soft, (0, NOFILE[1]), text, remedy)]


def check_memory_free(check: Check, facts: NodeFacts) -> list[Finding]:
    """How much main memory is free: what else sits there."""
    total, available = read_memory(facts.answer(MEMORY))
    share = available / total
    text = f"{gib(available)} ({share:.0%}) available of {gib(total)}"
    check = check.expecting(f"at least {MEMORY_FREE_SHARE[1]:.0%} free")
    return [check.above(share, MEMORY_FREE_SHARE, text, "look with `top -o %MEM` on the node for what holds it")]


def read_memory(answer: Answer) -> tuple[int, int]:
    """(total, available) in bytes."""
    found = dict(re.findall(r"^(\w+): (\d{1,15}) kB$", answer.section.output, re.M))
    total, available = (int(found.get(name, -1)) << 10 for name in ("MemTotal", "MemAvailable"))
    if total <= 0 or available < 0:
        raise answer.unreadable("MemTotal or MemAvailable is missing or 0")
    return total, available


@dataclass(frozen=True)
class Process:
    """One process of a run. owner: a user name or `uid 1000`. name: as it calls itself, whatever that is."""

    pid: int
    owner: str
    age_s: float
    name: str
    run_id: str


def check_runs(check: Check, facts: NodeFacts) -> list[Finding]:
    """Processes of earlier runs of ours that are still there."""
    check = check.expecting("no run is under way")
    processes, unread = read_runs(facts.answer(RUNS))
    if not processes:
        others = f" among those of this user ({unread} of others: only root may look into them)" if unread else ""
        return [check.ok(f"none{others}")]
    runs = sorted({process.run_id for process in processes})
    return [_run(check.on(one_line(run, 100)), [one for one in processes if one.run_id == run]) for run in runs]


def _run(check: Check, processes: Sequence[Process]) -> Finding:
    owners = ", ".join(sorted({process.owner for process in processes}))
    many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    oldest = sorted(processes, key=lambda one: -one.age_s)[:_NAMED]
    shown = ", ".join(f"{one.pid} {one_line(one.name, 40) or '(no name)'} ({age(one.age_s)})" for one in oldest)
    shown += f" and {len(processes) - _NAMED} more" if len(processes) > _NAMED else ""
    return check.warn(f"{many} of {owners}: {shown}", "if nobody waits for it, kill these processes")


def read_runs(answer: Answer) -> tuple[list[Process], int]:
    """(processes with BURST_RUN_ID in their environment, processes that could not be looked into)."""
    told = answer.section.document()
    try:
        rows = [
            (int(pid), str(owner), float(age_s), str(name), str(run)) for pid, owner, age_s, name, run in told["runs"]
        ]
        processes, unread = [Process(*row) for row in rows], int(told["unread"])
        is_seen = int(told["read"]) + unread > 0
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise answer.unreadable("no list of processes") from error
    if not is_seen:
        raise answer.unreadable("not one process was seen")
    return processes, unread


def compare_memory(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """host.memory: UNKNOWN for a node that did not tell.

    Kernels and firmware keep a little back, and not the same on equal machines: hence a tolerance, and no trait.
    """
    totals = {node: known(_total_memory, facts) for node, facts in nodes.items()}
    told = [total for total in totals.values() if total is not None]
    usual = statistics.median(told) if told else 0.0
    expected = f"{gib(usual)} within {MEMORY_TOLERANCE:.0%}" if len(told) > 1 else ""
    return [_memory(Check(node, "host.memory", expected), total, usual) for node, total in totals.items()]


def _total_memory(facts: NodeFacts) -> int:
    return read_memory(facts.answer(MEMORY))[0]


def _memory(check: Check, total: int | None, usual: float) -> Finding:
    if total is None:
        return check.unknown("the node did not tell how much memory it has", "run the check again")
    if abs(total - usual) > MEMORY_TOLERANCE * usual:
        remedy = "a module may be missing or switched off: `dmidecode -t memory`"
        return check.warn(f"{gib(total)}, the usual node has {gib(usual)}", remedy)
    return check.ok(gib(total))


GROUP = CheckGroup(
    "host",
    (check_disk, check_inodes, check_shm, check_memlock, check_nofile, check_memory_free, check_runs),
    questions=(LIMITS, DISK, MEMORY, RUNS),
    compare=compare_memory,
    compared={"host.memory": "The same main memory on all nodes, within 3%: a module may have failed."},
)
