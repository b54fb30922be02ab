"""Taking a testbed down: everything that bears its name, found on the machine itself and not only in its description.

It works for a testbed that stands, for one whose `up` was killed at any moment, and for one that is already gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.testbed.folder import TestbedError, TestbedFolder, folder_of, locked, standing_folders
from cluster.testbed.machine import try_command
from cluster.testbed.network import PREFIX, namespace_prefix
from cluster.testbed.node import NAMESPACES
from cluster.testbed.slurm import slurm_control_groups
from cluster.testbed.spec import is_testbed_name
from cluster.testbed.texts import MARK_VARIABLE, control_group, is_cluster_config
from engine.runs.process import process_start

_KILL_S = 10.0
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Removed:
    """What was taken away: counts, and the files outside of the testbed's folder."""

    name: str
    processes: int = 0
    namespaces: int = 0
    files: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        """Whether there was anything to remove."""
        return bool(self.processes or self.namespaces or self.files)


def standing_names() -> tuple[str, ...]:
    """Names of all testbeds of which anything is left on this machine: a folder, a namespace."""
    found = {folder.path.name for folder in standing_folders()}
    found |= {
        name.split(".")[1] for name in _names_in(NAMESPACES) if name.startswith(f"{PREFIX}.") and name.count(".") >= 2
    }
    return tuple(sorted(name for name in found if is_testbed_name(name)))


def tear_down(name: str, config_file: Path) -> Removed:
    """Remove the testbed `name` with everything it started and wrote. Idempotent; needs root.

    config_file: what its `up` would write for `cluster=NAME`; only a file that `up` wrote is removed. Raises
    TestbedError when something cannot be removed.
    """
    folder = folder_of(name)
    if not folder.is_ours():
        raise TestbedError(f"{folder.path} was not made by `burst testbed up`; nothing was touched")
    if not folder.path.exists():
        return _remove_parts(folder, config_file)
    with locked(folder.path):
        return _remove_parts(folder, config_file)


def _remove_parts(folder: TestbedFolder, config_file: Path) -> Removed:
    """`tear_down`, once nobody else works on the folder."""
    name = folder.path.name
    state = folder.load()
    files = [config_file] if state is None or state.config_file is None else [config_file, Path(state.config_file)]
    # A killed `up` may leave one command behind that just ends: what that made is found in the second pass.
    killed = _kill_all(name)
    namespaces = _remove_network(name)
    killed += _kill_all(name)
    namespaces += _remove_network(name)
    _remove_control_groups(name)
    removed = [str(path) for path in dict.fromkeys(files) if _remove_config(path)]
    if folder.path.exists():
        _remove_tree(folder.path)
        removed.append(str(folder.path))
    return Removed(name, killed, namespaces, tuple(removed))


def leftovers(name: str) -> list[str]:
    """What is left on this machine of the testbed `name`, in words; empty when nothing is."""
    found = [f"process {pid}" for pid in sorted(_processes(name))]
    found += [f"namespace {namespace}" for namespace in _own_namespaces(name)]
    found += [f"link {PREFIX}{name}"] if _link(name).exists() else []
    found += [f"control group {path}" for path in _control_groups(name)]
    found += [f"mount {path}" for path in _mounts_below(folder_of(name).path)]
    return found + ([f"folder {folder_of(name).path}"] if folder_of(name).path.exists() else [])


def _kill_all(name: str) -> int:
    """How many processes were killed: all that live in the testbed's namespaces or control group, or bear its mark."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    while found := _processes(name):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        if time.monotonic() > deadline:
            raise TestbedError(f"processes of testbed {name} do not end: {', '.join(map(str, sorted(found)))}")
        time.sleep(0.01)
    return len(killed)


def _processes(name: str) -> set[int]:
    """Live processes of the testbed."""
    spaces = set()
    for namespace in _own_namespaces(name):
        with contextlib.suppress(OSError):
            found = (NAMESPACES / namespace).stat()
            spaces.add((found.st_dev, found.st_ino))
    mark = f"{MARK_VARIABLE}={name}".encode()
    pids = {pid for pid in psutil.pids() if pid != os.getpid() and _belongs(pid, spaces, mark)}
    for group in _control_groups(name):
        pids |= set(_group_processes(group))
    return {pid for pid in pids if process_start(pid) is not None}


def _belongs(pid: int, spaces: Iterable[tuple[int, int]], mark: bytes) -> bool:
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        space = (process / "ns" / "net").stat()
        if (space.st_dev, space.st_ino) in spaces:
            return True
        return mark in (process / "environ").read_bytes().split(b"\0")
    return False


def _group_processes(group: Path) -> list[int]:
    pids = []
    with contextlib.suppress(OSError):  # of a group that somebody removes meanwhile
        for file in (group / "cgroup.procs", *group.glob("**/cgroup.procs")):
            with contextlib.suppress(OSError):
                pids += [int(line) for line in file.read_text().split()]
    return pids


def _control_groups(name: str) -> list[Path]:
    """The testbed's control groups, in every hierarchy (one in version 2, several in version 1)."""
    hierarchies = [_CONTROL_GROUPS, *(path for path in _CONTROL_GROUPS.glob("*") if not path.is_symlink())]
    candidates = [path / own for path in hierarchies for own in (control_group(name), *slurm_control_groups(name))]
    return [path for path in candidates if path.is_dir()]


def _remove_control_groups(name: str) -> None:
    for group in _control_groups(name):
        # A control group goes when its children are gone; its files cannot and need not be removed.
        children = sorted((path for path in group.glob("**/") if path != group), key=lambda path: -len(path.parts))
        for path in (*children, group):
            _remove_control_group(path)


def _remove_control_group(path: Path) -> None:
    deadline = time.monotonic() + _KILL_S
    while path.is_dir():
        try:
            path.rmdir()
        except OSError as error:
            # Busy until the kernel has buried its last process.
            if time.monotonic() > deadline:
                raise TestbedError(f"cannot remove the control group {path}: {error.strerror}") from error
            time.sleep(0.02)


def _names_in(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _own_namespaces(name: str) -> list[str]:
    """The network namespaces of the testbed `name`."""
    return [namespace for namespace in _names_in(NAMESPACES) if namespace.startswith(namespace_prefix(name))]


def _link(name: str) -> Path:
    """Where the kernel shows this machine's link into the testbed."""
    return Path("/sys/class/net", f"{PREFIX}{name}")


def _remove_network(name: str) -> int:
    """How many namespaces were removed."""
    found = _own_namespaces(name)
    # By its name alone it could be somebody's; ours has its other end in one of these.
    if found and _link(name).exists():
        try_command(("ip", "link", "delete", _link(name).name))
    for namespace in found:
        done = try_command(("ip", "netns", "delete", namespace))
        if (NAMESPACES / namespace).exists():
            # `ip netns add` was killed between making the file and binding the namespace to it.
            try_command(("umount", str(NAMESPACES / namespace)))
            try:
                (NAMESPACES / namespace).unlink(missing_ok=True)
            except OSError as error:
                raise TestbedError(f"cannot remove namespace {namespace}: {done.stderr.strip()}") from error
    return len(found)


def _remove_config(path: Path) -> bool:
    try:
        if not is_cluster_config(path.read_text(encoding="utf-8", errors="replace")):
            return False
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _mounts_below(folder: Path) -> list[str]:
    """Mount points in `folder` that this process sees, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    points = [line.split()[4] for line in lines]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)


def _remove_tree(folder: Path) -> None:
    """Remove `folder` without ever reaching through a mount into what is not ours."""
    for point in _mounts_below(folder):
        try_command(("umount", "-l", point))
    if left := _mounts_below(folder):
        raise TestbedError(f"cannot unmount {', '.join(left)}; nothing below {folder} was removed")
    # A command that a killed `up` left behind may write a last file meanwhile.
    for last in (False, False, True):
        try:
            shutil.rmtree(folder)
            return
        except OSError as error:
            if last:
                raise TestbedError(f"cannot remove {error.filename}: {error.strerror}") from error
            time.sleep(0.1)
