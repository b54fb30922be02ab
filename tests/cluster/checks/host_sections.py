"""What a healthy GPU node with Docker answers to group host, written by hand, and ways to change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from testkit.check_fakes import Groups, ended

from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig, ContainerConfig

GROUP = Groups("host")

DOCKER = ClusterConfig(container=ContainerConfig(runtime="docker", image="burst:cuda"), shared_folder="/mnt/shared")
BARE = ClusterConfig()


def room(free: int = 876 << 30, inodes: int = 110, of: int = 117, kind: str = "ext4") -> dict[str, object]:
    """A file system with so many bytes free."""
    return {"size": 1752 << 30, "free": free, "inodes": of, "inodes_free": inodes, "kind": kind}


HEALTHY: Mapping[str, Any] = {
    "host.system": {
        "adapters": 2,
        "locked": "unlimited",
        "files": [1048576, 1048576],
        "memory": [2113513980 << 10, 2080000000 << 10],
        "rooms": {"/": room(), "/tmp": room()},
        "shm": room(kind="tmpfs"),
    },
    "host.shared": {"room": room(inodes=0, of=0, kind="nfs4"), "trouble": ""},
    "host.software": {"python": "3.10.12", "executable": "/usr/bin/python3", "modules": {"torch": None}, "nccl": None},
    "env_live": {"login": {}, "files": {}, "ranks": []},
    "host.docker": {
        "version": "26.1.3",
        "folder": "/var/lib/docker",
        "driver": "overlay2",
        "ways": ["nvidia"],
        "has_gpus": True,
        "room": room(),
    },
    "host.image": {
        "Id": "sha256:cc",
        "Architecture": "amd64",
        "Os": "linux",
        "Created": "2026-01-05T10:00:00.123456789Z",
        "RootFS": {"Type": "layers", "Layers": ["sha256:aa", "sha256:bb"]},
        "Config": {"User": "burst", "Env": ["A=1"]},
        "Size": 19327352832,
    },
}
BARE_SOFTWARE = {
    "python": "3.11.9",
    "executable": "/usr/bin/python3",
    "modules": {"torch": "2.9.1+cu128"},
    "nccl": "2.27.5",
}


def healthy(node: str = "node1", **changes: object) -> NodeProbe:
    """A healthy node; `docker=...` replaces the answer of section host.docker."""
    told = {**HEALTHY, **{"env_live" if name == "live" else f"host.{name}": one for name, one in changes.items()}}
    return NodeProbe(node, {name: ended(name, json.dumps(one)) for name, one in told.items()})


def changed(section: str, **changes: object) -> NodeProbe:
    """A healthy node with other values in one section."""
    return healthy(**{section: {**HEALTHY["env_live" if section == "live" else f"host.{section}"], **changes}})
