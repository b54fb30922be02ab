"""Fake hardware of a node on disk, with links to what is real.

BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in all that a probe reads, so whatever has no fake must lead to
the node's own: a symbolic link per entry, in folders of which only a part is fake.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cluster.testbed.folder import NodeFolder
from cluster.testbed.hardware.files import FakeFile

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


def lay_hardware(folder: NodeFolder, files: Mapping[str, FakeFile], interfaces: tuple[str, ...]) -> None:
    """Put `files` into the node's folder in the place of those that are there; `interfaces` are its real links."""
    new = folder.path / "hardware.new"
    for path in (new, folder.fake, folder.bin):
        shutil.rmtree(path, ignore_errors=True)
    for name, file in files.items():
        file.write(new / name)
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
