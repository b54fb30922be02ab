"""What a healthy GPU node with Docker answers to host.sh, written by hand, and ways to change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from testkit.check_fakes import Groups

from cluster.checks.finding import Finding, Verdict
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig, ContainerConfig

GROUP = Groups("host")

DOCKER = ClusterConfig(container=ContainerConfig(runtime="docker", image="burst:cuda"), shared_folder="/mnt/shared")
BARE = ClusterConfig()
GIB_BLOCKS = 262144  # of 4096 bytes

HEALTHY: Mapping[str, str] = {
    "host.limits": "rdma mlx5_0\nrdma mlx5_1\nnofile_soft 1048576\nnofile_hard 1048576\nmemlock unlimited",
    "host.disk": (
        "root 4096 459276288 229638144 117440512 110000000 ext2/ext3\n"
        "tmp 4096 459276288 229638144 117440512 110000000 ext2/ext3\n"
        "shm 4096 264241152 264241152 264241152 264241000 tmpfs"
    ),
    "host.shared": "shared 1048576 104857600 52428800 0 0 nfs",
    "host.memory": "MemTotal: 2113513980 kB\nMemAvailable: 2080000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB",
    "host.runs": '{"read": 3456, "unread": 0, "runs": []}',
    "host.software": "runtime docker\npython 3.10.12\npackages read",
    "host.nccl": "absent system\nabsent user\nend",
    "host.docker": (
        "hook nvidia-container-runtime-hook\nhook nvidia-ctk\ngpus\n"
        'ServerVersion "26.1.3"\nDockerRootDir "/var/lib/docker"\nDriver "overlay2"\n'
        'Runtimes {"io.containerd.runc.v2":{"path":"runc"},"nvidia":{"path":"nvidia-container-runtime"}}\n'
        "docker 4096 459276288 229638144 117440512 110000000 ext2/ext3"
    ),
    "host.image": (
        'image "amd64" "linux" "2026-01-05T10:00:00.123456789Z" ["sha256:aa","sha256:bb"]\nsize 19327352832'
    ),
}
BARE_SOFTWARE = "runtime bare\npython 3.11.9\npackage nvidia-nccl-cu12 2.27.5\npackage torch 2.9.1+cu128\npackages read"


def healthy(node: str = "node1", **changes: str) -> NodeProbe:
    """A healthy node; `disk="..."` replaces the output of section host.disk."""
    texts = {**HEALTHY, **{f"host.{name}": text for name, text in changes.items()}}
    return NodeProbe(node, {name: Section(name, text, 0, SectionState.ENDED) for name, text in texts.items()})


def edited(section: str, old: str, new: str) -> NodeProbe:
    """A healthy node with `old` in one section replaced, which must be there."""
    name = f"host.{section}"
    assert old in HEALTHY[name]
    return healthy(**{section: HEALTHY[name].replace(old, new)})


def damaged(section: Section) -> NodeProbe:
    """A healthy node with one section in another state."""
    return replace(healthy(), sections={**healthy().sections, section.name: section})


def ended(name: str, code: int, output: str = "") -> NodeProbe:
    """A healthy node one of whose sections ended with `code`."""
    return damaged(Section(name, output, code, SectionState.ENDED))


def findings(probe: NodeProbe, check: str, config: ClusterConfig = DOCKER) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in GROUP.check(probe, config) if finding.check == check]


def verdict(probe: NodeProbe, check: str, config: ClusterConfig = DOCKER) -> Verdict:
    """The verdict of a check that has one finding."""
    (finding,) = findings(probe, check, config)
    return finding.severity
