"""The files that tools and the probe read on a machine with GPUs and InfiniBand: /sys, /proc, kernel logs, nvidia-smi.

BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in what a probe reads of hardware.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.hardware.devices import NO_HARDWARE, build_hardware
from cluster.testbed.templates import render
from engine.config.errors import ConfigError


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
    hardware = build_hardware(profile, number, faults)
    values = {**vars(hardware), "node": node, "number": number, "folder": pci_folder}
    tools = {f"bin/{name}": FakeFile(render(f"{name}.sh", **values), 0o755) for name in ("nvidia-smi", "dcgmi")}
    return tools | {f"root/{path}": file for path, file in _parse(render("node.tree", **values)).items()}


def pci_folder(path: tuple[str, ...]) -> str:
    """The folder of a PCI device: `sys/devices/pci0000:15/0000:15:01.0/.../0000:1b:00.0`."""
    return "/".join((f"sys/devices/pci{path[0][:7]}", *path))


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
