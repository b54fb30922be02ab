"""Taking a testbed down: everything that bears its name, found on the machine itself and not only in its description.

It works for a testbed that stands, for one whose `up` was killed at any moment, and for one that is already gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.testbed.machine import MARK_VARIABLE, TestbedError, try_command
from cluster.testbed.plan import control_group, is_cluster_config
from cluster.testbed.slurm import slurm_control_groups
from cluster.testbed.spec import is_testbed_name
from cluster.testbed.testbed import (
    NAMESPACES,
    PREFIX,
    is_ours,
    load_testbed,
    locked,
    namespace_prefix,
    standing_folders,
    state_root,
)
from engine.runs.process import process_start

_PATIENCE_S = 60.0
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Removed:
    """What was taken away: counts, and the files outside of the testbed's folder."""

    name: str
    processes: int
    namespaces: int
    files: tuple[str, ...]

    @property
    def anything(self) -> bool:
        """Whether there was anything to remove."""
        return any((self.processes, self.namespaces, self.files))


def standing_names() -> tuple[str, ...]:
    """Names of all testbeds of which anything is left on this machine: a folder, a namespace."""
    found = {path.name for path in standing_folders()}
    found |= {name.split(".")[1] for name in _namespaces(f"{PREFIX}.") if name.count(".") >= 2}
    return tuple(sorted(name for name in found if is_testbed_name(name)))


def tear_down(name: str, config_file: Path) -> Removed:
    """Remove the testbed `name` with everything it started and wrote. Idempotent; needs root.

    config_file: what its `up` would write for `cluster=NAME`; only a file that `up` wrote is removed. Raises
    TestbedError when something cannot be removed.
    """
    path = state_root() / name
    if not is_ours(path):
        raise TestbedError(f"{path} was not made by `burst testbed up`; nothing was touched")
    with locked(path) if path.exists() else contextlib.nullcontext():
        testbed = load_testbed(path)
        configs = {config_file} if testbed is None else {config_file, Path(str(testbed.config_file))}
        files = [one for one in sorted(configs) if one.exists() and is_cluster_config(one)]
        for file in files:
            file.unlink()
        files += [path] if path.exists() else []
        processes, namespaces = _remove_all(name)
    return Removed(name, processes, namespaces, tuple(map(str, files)))


def leftovers(name: str) -> list[str]:
    """What is left on this machine of the testbed `name`, in words; empty when nothing is."""
    return [
        *(f"process {pid}" for pid in sorted(_processes(name))),
        *(f"namespace {namespace}" for namespace in _namespaces(namespace_prefix(name))),
        *([f"link {PREFIX}{name}"] if Path(f"/sys/class/net/{PREFIX}{name}").exists() else []),
        *(f"control group {group}" for group in _control_groups(name)),
        *(f"mount {point}" for point in _mounts(name)),
        *([f"folder {state_root() / name}"] if (state_root() / name).exists() else []),
    ]


def _remove_all(name: str) -> tuple[int, int]:
    """How many processes and namespaces there were. Again and again: what dies may leave something behind."""
    pids: set[int] = set()
    spaces: set[str] = set()
    folder, deadline, reason = state_root() / name, time.monotonic() + _PATIENCE_S, ""
    while left := [one for one in leftovers(name) if not one.startswith("link ")]:  # which goes with its namespace
        if time.monotonic() > deadline:
            raise TestbedError(f"testbed {name}: cannot remove {', '.join(left)}{reason}")
        for pid in _processes(name):
            pids.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for namespace in _namespaces(namespace_prefix(name)):
            spaces.add(namespace)
            _remove_namespace(namespace)
        # Control groups are busy until the kernel has buried their last process, and others remove them meanwhile.
        for group in _control_groups(name):
            with contextlib.suppress(OSError):
                for path in sorted(group.glob("**/"), reverse=True):
                    path.rmdir()
        for point in _mounts(name):
            try_command(("umount", "-l", point))
        try:
            if folder.exists() and not _mounts(name):  # never through a mount into what is not ours
                shutil.rmtree(folder)
        except OSError as error:
            reason = f" ({error})"
        time.sleep(0.01)
    return len(pids), len(spaces)


def _processes(name: str) -> set[int]:
    """Live processes of the testbed: all that are in its namespaces or control groups, or bear its mark."""
    spaces = set()
    for namespace in _namespaces(namespace_prefix(name)):
        with contextlib.suppress(OSError):
            found = (NAMESPACES / namespace).stat()
            spaces.add((found.st_dev, found.st_ino))
    mark = f"{MARK_VARIABLE}={name}".encode()
    pids = {pid for pid in psutil.pids() if pid != os.getpid() and _belongs(pid, spaces, mark)}
    for group in _control_groups(name):
        with contextlib.suppress(OSError):  # of a group that somebody removes meanwhile
            for file in group.glob("**/cgroup.procs"):
                with contextlib.suppress(OSError):
                    pids |= {int(line) for line in file.read_text().split()}
    return {pid for pid in pids if process_start(pid) is not None}


def _belongs(pid: int, spaces: set[tuple[int, int]], mark: bytes) -> bool:
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        space = (process / "ns" / "net").stat()
        if (space.st_dev, space.st_ino) in spaces:
            return True
        return mark in (process / "environ").read_bytes().split(b"\0")
    return False


def _control_groups(name: str) -> list[Path]:
    """The testbed's control groups, in every hierarchy (one in version 2, several in version 1)."""
    hierarchies = [_CONTROL_GROUPS, *(path for path in _CONTROL_GROUPS.glob("*") if not path.is_symlink())]
    candidates = [path / own for path in hierarchies for own in (control_group(name), *slurm_control_groups(name))]
    return [path for path in candidates if path.is_dir()]


def _namespaces(prefix: str) -> list[str]:
    """The network namespaces whose names begin so."""
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))


def _remove_namespace(namespace: str) -> None:
    testbed, own = namespace.split(".")[1:]
    if own == "switch":  # where the other end of this machine's link is
        try_command(("ip", "link", "delete", f"{PREFIX}{testbed}"))
    try_command(("ip", "netns", "delete", namespace))
    if (NAMESPACES / namespace).exists():
        # `ip netns add` was killed between making the file and binding the namespace to it.
        try_command(("umount", str(NAMESPACES / namespace)))
        with contextlib.suppress(OSError):
            (NAMESPACES / namespace).unlink(missing_ok=True)


def _mounts(name: str) -> list[str]:
    """Mount points in the testbed's folder that this process sees, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    points, folder = (line.split()[4] for line in lines), (state_root() / name).resolve()
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)
