"""The files that tools and the probe read on a machine with GPUs and InfiniBand: /sys, /proc, kernel logs, nvidia-smi.

BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in all that a probe reads, so whatever has no fake must lead to
the node's own: a symbolic link per entry, in folders of which only a part is fake.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.hardware.devices import NO_HARDWARE, build_hardware
from cluster.testbed.templates import render
from cluster.testbed.testbed import Node
from engine.config.errors import ConfigError

_FABRIC_MANAGER_PID = 4711
_THROTTLE_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)
_COUNTERS = (
    "counters/excessive_buffer_overrun_errors",
    "counters/link_error_recovery",
    "counters/local_link_integrity_errors",
    "counters/port_rcv_errors",
    "counters/port_rcv_remote_physical_errors",
    "counters/port_xmit_discards",
    "counters/symbol_error",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
)
_SYSTEM = ("sys/devices/system", "sys/kernel")
# Devices of this machine must not show up among fake ones, so folders of devices are not on this list.
_PARTLY_FAKE = ("", "dev", "etc", "proc", "proc/self", "sys", "sys/class", "sys/devices", *_SYSTEM)


@dataclass(frozen=True)
class FakeFile:
    """A file with `text`, or a symbolic link to `link_to` (then text and mode mean nothing)."""

    text: str = ""
    mode: int = 0o644
    link_to: str | None = None

    def write(self, path: Path) -> None:
        """Lay it there, with the folders above."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.link_to is not None:
            path.symlink_to(self.link_to)
        else:
            path.write_text(self.text, encoding="utf-8")
            path.chmod(self.mode)


def hardware_files(profile: str, node: str, number: int, faults: Iterable[str] = ()) -> dict[str, FakeFile]:
    """Every file of `node`, the testbed's `number`-th from 1, by its path below `root/` or `bin/`; see hardware.yaml.

    Raises ConfigError that names an unknown fault.
    """
    faults = tuple(faults)
    if profile == NO_HARDWARE:
        if faults:
            raise ConfigError(
                f"hardware {faults[0]}: the testbed has no fake hardware; build one with --hardware h100x8"
            )
        return {}
    hardware = build_hardware(profile, node, number, faults)
    processes = {gpu.pid: "python3" for gpu in hardware.gpus if gpu.pid is not None} | {1: "systemd"}
    if "no_fabric_manager" not in hardware.flags:
        processes[_FABRIC_MANAGER_PID] = "nv-fabricmanage"
    tree = render(
        "node.tree",
        model=hardware.model,
        module=f"NVIDIA UNIX Open Kernel Module for x86_64  {hardware.driver}  Release Build",
        gpus=hardware.gpus,
        adapters=[adapter for adapter in hardware.adapters if adapter.is_there],
        flags=hardware.flags,
        limits=_limits(),
        processes=processes.items(),
        counters=_COUNTERS,
        number=number,
        folder=pci_folder,
    )
    smi = render(
        "nvidia-smi.sh",
        model=hardware.model,
        driver=hardware.driver,
        gpus=[gpu for gpu in hardware.gpus if gpu.is_listed],
        lost=next((gpu for gpu in hardware.gpus if gpu.is_lost), None),
        flags=hardware.flags,
        throttle_reasons=_THROTTLE_REASONS,
    )
    dcgmi = render("dcgmi.sh", gpus=hardware.gpus, flags=hardware.flags, driver=hardware.driver)
    tools = {"bin/nvidia-smi": FakeFile(smi, 0o755), "bin/dcgmi": FakeFile(dcgmi, 0o755)}
    return tools | {f"root/{path}": file for path, file in _parse(tree).items()}


def pci_folder(path: tuple[str, ...]) -> str:
    """The folder of a PCI device: `sys/devices/pci0000:15/0000:15:01.0/.../0000:1b:00.0`."""
    return "/".join((f"sys/devices/pci{path[0][:7]}", *path))


def lay_hardware(node: Node, faults: Iterable[str] = ()) -> None:
    """Put the files of the node's hardware, with these faults, in the place of those that are there."""
    spec = node.testbed.spec
    files = hardware_files(spec.hardware, node.name, node.number, faults)
    places = {"root": node.fake, "bin": node.bin}
    for path in places.values():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    for name, file in files.items():
        place, _, rest = name.partition("/")
        file.write(places[place] / rest)
    for place in _PARTLY_FAKE if files else ():
        if (node.fake / place).is_dir():
            # Numbers are processes: they come and go, and /proc/self must be the reader's.
            _link(node.fake, place, [name for name in os.listdir(f"/{place}") if not name.isdigit()])  # noqa: PTH208
    if files:
        _link(node.fake, "sys/class/net", ("lo", *spec.interfaces))


def _link(root: Path, place: str, names: Iterable[str]) -> None:
    for name in names:
        path = root / place / name
        if not path.exists() and not path.is_symlink() and path.parent.is_dir():
            path.symlink_to(f"/{place}/{name}" if place else f"/{name}")


def _limits() -> str:
    """Those of this process, but memory that it may lock: raising that takes a capability that a container may lack."""
    limits = Path("/proc/self/limits").read_text(encoding="ascii").rstrip("\n")
    unlimited = r"\1unlimited            unlimited            bytes"
    return re.sub(r"(?m)^(Max locked memory +).*$", unlimited, limits)


def _parse(tree: str) -> dict[str, FakeFile]:
    """The files of a tree, by path; the template says how it is written."""
    files, lines = {}, iter(tree.splitlines())
    for line in lines:
        path, sign, text = f"{line} ".split(" ", 2)
        if sign == "->":
            files[path] = FakeFile(link_to=posixpath.relpath(text.strip(), posixpath.dirname(path)))
        elif sign == "<<":
            files[path] = FakeFile("".join(f"{one}\n" for one in iter(lambda: next(lines), ".")))
        else:
            files[path] = FakeFile(f"{text[:-1]}\n")
    return files
