"""Fake hardware of a node on disk: what the modules in `cluster.testbed.hardware` describe, and links to what is real.

BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in all that a probe reads, so whatever has no fake must lead to
the node's own: a symbolic link per entry, in folders of which only a part is fake.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from cluster.testbed.folder import NodeFolder, TestbedError
from cluster.testbed.hardware.files import FakeFile
from engine.errors import ConfigError

NO_HARDWARE = "none"
# Devices of this machine must not show up among fake ones, so folders of devices are not on this list.
_PARTLY_FAKE = (
    "",
    "dev",
    "etc",
    "proc",
    "proc/self",
    "sys",
    "sys/class",
    "sys/devices",
    "sys/devices/system",
    "sys/kernel",
)
_NETWORK = "sys/class/net"


def hardware_files(profile: str, node: str, number: int, faults: tuple[str, ...]) -> dict[str, FakeFile]:
    """Every file of `node`, the testbed's `number`-th from 1, with this hardware and these faults, by relative path.

    Raises ConfigError that names what is unknown: the profile or a fault.
    """
    if profile == NO_HARDWARE:
        if faults:
            raise ConfigError(
                f"hardware {faults[0]}: the testbed has no fake hardware; build one with --hardware h100x8"
            )
        return {}
    from cluster.testbed.hardware import fabric, gpus

    for_fabric = tuple(fault for fault in faults if fault.partition(":")[0] in fabric.FAULTS)
    for_gpus = tuple(fault for fault in faults if fault not in for_fabric)
    limits = Path("/proc/self/limits").read_text(encoding="ascii")
    own = {
        "root/proc/self/limits": FakeFile(unlocked_limits(limits)),
        "root/etc/cdi/nvidia.yaml": FakeFile("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n"),
    }
    adapters = fabric.fabric_files(profile, number, for_fabric)
    devices = gpus.gpu_files(profile, node, for_gpus, adapters=gpus.fake_adapters(adapters))
    return {**own, **devices, **adapters}


def unlocked_limits(limits: str) -> str:
    """A text like /proc/self/limits in which processes may lock any memory, as machines with such adapters let them.

    A testbed cannot raise the real limit: that takes a capability that root in a container may lack.
    """
    return re.sub(r"(?m)^(Max locked memory +).*$", r"\1unlimited            unlimited            bytes", limits)


def lay_hardware(folder: NodeFolder, files: Mapping[str, FakeFile], interfaces: tuple[str, ...]) -> None:
    """Put `files` into the node's folder in the place of those that are there; `interfaces` are its real links."""
    new = folder.path / "hardware.new"
    for path in (new, folder.fake, folder.bin):
        shutil.rmtree(path, ignore_errors=True)
    for name, file in files.items():
        file.write(new / _checked(name))
    for name, path in (("root", folder.fake), ("bin", folder.bin)):
        (new / name).mkdir(parents=True, exist_ok=True)
        (new / name).rename(path)
    shutil.rmtree(new)
    if files:
        _link_real_entries(folder.fake, interfaces)


def _link_real_entries(root: Path, interfaces: tuple[str, ...]) -> None:
    for place in _PARTLY_FAKE:
        if (root / place).is_dir():
            # Numbers are processes: they come and go, and /proc/self must be the reader's.
            names = [name for name in os.listdir(f"/{place}") if not name.isdigit()]  # noqa: PTH208
            _link(root, place, names)
    _link(root, _NETWORK, ("lo", *interfaces))


def _link(root: Path, place: str, names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        path = root / place / name
        if not path.exists() and not path.is_symlink() and path.parent.is_dir():
            path.symlink_to(f"/{place}/{name}" if place else f"/{name}")


def _checked(name: str) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) < 2 or parts[0] not in ("root", "bin") or ".." in parts:
        raise TestbedError(f"fake file {name!r}: expected a path below root/ or bin/")
    return name
