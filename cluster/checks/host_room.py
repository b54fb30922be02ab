"""Room and limits of a node: disks, inodes, shared memory, main memory, what a session may use."""

from __future__ import annotations

import math

from cluster.checks.finding import Finding
from cluster.checks.report import Part, Report, gib
from cluster.parse.host import (
    GIB,
    Filesystem,
    Limits,
    parse_disks,
    parse_limits,
    parse_memory,
)
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

# Free bytes: below the first a run cannot work, below the second it may soon not.
ROOT_FREE_BYTES = (1 * GIB, 10 * GIB)
TMP_FREE_BYTES = (GIB // 2, 5 * GIB)
# 64 MiB is what containers get by default: less than one pair of ranks and a data loader take.
SHM_FREE_BYTES = (64 << 20, GIB)
INODES_FREE_SHARE = (0.01, 0.05)
MEMORY_FREE_SHARE = (0.05, 0.20)
# Sockets and files of eight ranks with their data loaders on many nodes; 1024 is what sessions often get.
NOFILE = (1024, 8192)


def judge_disks(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.disk and host.inodes of / and the temporary folder, host.shm."""
    disks = parse_disks(probe)
    found = []
    for name, device, floor in (("root", "/", ROOT_FREE_BYTES), ("tmp", "/tmp", TMP_FREE_BYTES)):
        room = disks[name]
        if room is None:
            found += [
                Report(probe.node, check, "", device).unknown("not there") for check in ("host.disk", "host.inodes")
            ]
            continue
        found.append(judge_room(Report(probe.node, "host.disk", f"at least {gib(floor[1])} free", device), room, floor))
        found.append(judge_inodes(Report(probe.node, "host.inodes", "at least 5% free", device), room))
    return [*found, _judge_shm(probe, disks["shm"])]


def judge_room(report: Report, room: Filesystem, floor: tuple[int, int]) -> Finding:
    """Whether the bytes free are above both floors."""
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)} ({room.kind})"
    remedy = f"free space on {report.device or 'it'}, or put it on a larger disk"
    if room.free_bytes < floor[0]:
        return report.fail(text, remedy)
    return report.warn(text, remedy) if room.free_bytes < floor[1] else report.ok(text)


def judge_inodes(report: Report, room: Filesystem) -> Finding:
    """Whether files can still be made, however many bytes are free."""
    if room.inodes == 0:
        return report.ok(f"made as needed ({room.kind})")
    share = room.inodes_free / room.inodes
    text = f"{share:.0%} of {room.inodes} free"
    remedy = "remove folders with very many small files, such as old caches and environments"
    if share < INODES_FREE_SHARE[0]:
        return report.fail(text, remedy)
    return report.warn(text, remedy) if share < INODES_FREE_SHARE[1] else report.ok(text)


def _judge_shm(probe: NodeProbe, room: Filesystem | None) -> Finding:
    report = Report(probe.node, "host.shm", f"a tmpfs with at least {gib(SHM_FREE_BYTES[1])} free", "/dev/shm")
    remedy = "mount a larger tmpfs there (containers: --ipc host or --shm-size), or remove what runs left in it"
    if room is None:
        return report.fail("not there: NCCL and data loaders need it", remedy)
    if room.kind not in ("tmpfs", "ramfs"):
        return report.warn(f"on a disk ({room.kind}), not in memory", remedy)
    return judge_room_of_shm(report, room, remedy)


def judge_room_of_shm(report: Report, room: Filesystem, remedy: str) -> Finding:
    """Like judge_room; a tmpfs of exactly the default size of containers is too small as well."""
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)}"
    if room.free_bytes <= SHM_FREE_BYTES[0]:
        return report.fail(text, remedy)
    return report.warn(text, remedy) if room.free_bytes < SHM_FREE_BYTES[1] else report.ok(text)


def judge_limits(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.memlock and host.nofile of an SSH session."""
    limits = parse_limits(probe)
    return [_judge_memlock(probe, config, limits), _judge_nofile(probe, limits)]


def _judge_memlock(probe: NodeProbe, config: ClusterConfig, limits: Limits) -> Finding:
    report = Report(probe.node, "host.memlock", "unlimited where RDMA adapters are")
    if math.isinf(limits.memlock_kib):
        return report.ok("unlimited")
    text = f"{gib(limits.memlock_kib * 1024)} in an SSH session"
    if config.container.runtime == "docker":
        return report.ok(f"{text}; containers get a limit of their own")
    remedy = "set `* - memlock unlimited` in /etc/security/limits.d and LimitMEMLOCK=infinity for sshd"
    if limits.rdma_devices:
        return report.fail(f"{text}, and {len(limits.rdma_devices)} RDMA adapters must lock what they send", remedy)
    return report.ok(f"{text}; only RDMA adapters need more, and there is none")


def _judge_nofile(probe: NodeProbe, limits: Limits) -> Finding:
    report = Report(probe.node, "host.nofile", f"at least {NOFILE[1]}")
    text = f"{limits.nofile_soft:g} open files, at most {limits.nofile_hard:g}"
    remedy = "set `* - nofile 1048576` in /etc/security/limits.d"
    if limits.nofile_hard < NOFILE[0]:
        return report.fail(text, remedy)
    return report.warn(text, remedy) if limits.nofile_soft < NOFILE[1] else report.ok(text)


def judge_memory(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.memory_free: whether something else sits in main memory."""
    memory = parse_memory(probe)
    report = Report(probe.node, "host.memory_free", f"at least {MEMORY_FREE_SHARE[1]:.0%} free")
    share = memory.available_bytes / memory.total_bytes
    text = f"{gib(memory.available_bytes)} ({share:.0%}) available of {gib(memory.total_bytes)}"
    remedy = "look with `top -o %MEM` on the node for what holds it"
    if share < MEMORY_FREE_SHARE[0]:
        return [report.fail(text, remedy)]
    return [report.warn(text, remedy) if share < MEMORY_FREE_SHARE[1] else report.ok(text)]


PARTS = (
    Part("host.disk", ("host.disk", "host.inodes", "host.shm"), judge_disks),
    Part("host.limits", ("host.memlock", "host.nofile"), judge_limits),
    Part("host.memory", ("host.memory_free",), judge_memory),
)
