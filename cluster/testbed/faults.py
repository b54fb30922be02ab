"""Fault switches: what can go wrong with a node, put in force and taken back.

The faults of a node are a list in the testbed's state; each kind makes the node be as the list says, whatever it was
before. So every fault can be taken back, in any order, also after a failure in between.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.testbed.build import open_testbed
from cluster.testbed.hardware.files import hardware_files
from cluster.testbed.machine import run_command, try_command
from cluster.testbed.node import lay_hardware, sshd
from cluster.testbed.plan import key_command, link_command, rate_commands
from cluster.testbed.spec import parse_rate
from cluster.testbed.testbed import Fault, Node, Testbed, locked
from engine.config.errors import ConfigError

_DISK_SOURCE = "burst-fault"  # names our mounts
_DISK = re.compile(r"(/[^\0\n]*?)(?::([0-9]+[kmg]))?")
_FULL_KIB = 64


@dataclass(frozen=True)
class FaultKind:
    """One switch: makes a node be as these of its faults say, all of its kind.

    value: what its value is called, in brackets where it may be left out; None without. several: they may be in force
    with different values.
    """

    enforce: Callable[[Node, Sequence[Fault]], None]
    value: str | None = None
    several: bool = False


def _links(node: Node, faults: Sequence[Fault]) -> None:
    values, interfaces = _values(faults, "link_down"), node.testbed.spec.interfaces
    for interface in interfaces:
        run_command(link_command(node, interface, up=interface not in (interfaces if None in values else values)))


def _rates(node: Node, faults: Sequence[Fault]) -> None:
    slow = _values(faults, "link_slow")
    rate = parse_rate(slow[0] or "") if slow else node.testbed.spec.rate_bits_per_s
    for command in rate_commands(node, rate):
        run_command(command)


def _sshd(node: Node, faults: Sequence[Fault]) -> None:
    kinds, daemon = {fault.kind for fault in faults}, sshd(node)
    if _swap_host_key(node.ssh, swapped="key_swap" in kinds) or "sshd_stop" in kinds:
        daemon.kill()
    if "sshd_stop" in kinds:
        return
    if daemon.pid() is None:
        daemon.start()
        daemon.wait()
    if (pid := daemon.pid()) is not None:
        os.kill(pid, signal.SIGSTOP if "sshd_hang" in kinds else signal.SIGCONT)


def _swap_host_key(ssh: Path, *, swapped: bool) -> bool:
    """Whether the host key had to change. The true one waits beside it; nobody's known_hosts is touched."""
    key, true_key = ssh / "host_key", ssh / "host_key.true"
    if swapped == true_key.exists():
        return False
    (ssh / "host_key.pub").unlink(missing_ok=True)  # sshd leaves out a key whose public half is another's
    if swapped:
        key.rename(true_key)
        run_command(key_command(key, "swapped"))
    else:
        true_key.rename(key)
    return True


def _login(node: Node, faults: Sequence[Fault]) -> None:
    key = node.testbed.client_key.with_suffix(".pub").read_text(encoding="utf-8")
    node.authorized_keys.write_text("" if _values(faults, "login_refused") else key, encoding="utf-8")


def _disks(node: Node, faults: Sequence[Fault]) -> None:
    wanted = dict(_parse_disk(value) for value in _values(faults, "disk_full"))
    listing = try_command(node.inside("findmnt", "--json", "--list", "--source", _DISK_SOURCE, "--output", "TARGET"))
    mounted = [mount["target"] for mount in json.loads(listing.stdout or '{"filesystems": []}')["filesystems"]]
    for path in mounted:
        if path not in wanted:
            run_command(node.inside("umount", "-l", path))
    for path, free in wanted.items():
        if path in mounted:
            continue
        run_command(node.inside("mount", "-t", "tmpfs", "-o", f"size={free or f'{_FULL_KIB}k'}", _DISK_SOURCE, path))
        if free is None:
            # Ends with "no space left on device": that is what it is for.
            try_command(node.inside("dd", "if=/dev/zero", f"of={path}/full", "bs=4k", f"count={_FULL_KIB}"))


def _hardware(node: Node, faults: Sequence[Fault]) -> None:
    lay_hardware(node, [value or "" for value in _values(faults, "hardware")])


FAULT_KINDS = {
    "link_down": FaultKind(_links, "[INTERFACE]", several=True),
    "link_slow": FaultKind(_rates, "RATE"),
    "sshd_stop": FaultKind(_sshd),
    "sshd_hang": FaultKind(_sshd),
    "key_swap": FaultKind(_sshd),
    "login_refused": FaultKind(_login),
    "disk_full": FaultKind(_disks, "PATH[:FREE]", several=True),
    "hardware": FaultKind(_hardware, "FAULT", several=True),
}


def set_fault(testbed: Testbed, node: str, kind: str, value: str | None = None) -> Testbed:
    """The testbed with this fault on `node` beside those that are there; of a kind that can be only once, it replaces.

    Raises ConfigError for a kind or value that makes no sense. Tells nothing to whoever is connected.
    """
    fault = Fault(kind, value)
    _check(testbed.node(node), fault)
    several = FAULT_KINDS[kind].several
    return _change(testbed, node, lambda old: old.kind != kind or (several and old.value != value), (fault,))


def clear_faults(testbed: Testbed, node: str, kind: str | None = None, value: str | None = None) -> Testbed:
    """The testbed without the faults of `node`: all of them, those of a kind, or that of a kind with a value."""
    testbed.node(node)
    if kind is not None:
        _kind(kind)
    return _change(testbed, node, lambda old: kind not in (None, old.kind) or value not in (None, old.value))


def _change(testbed: Testbed, node: str, keep: Callable[[Fault], bool], more: tuple[Fault, ...] = ()) -> Testbed:
    with locked(testbed.path):
        standing = open_testbed(testbed.name)
        before = standing.faults.get(node, ())
        after = (*filter(keep, before), *more)
        # Written down first: what fails half-way is then known, and can be cleared.
        changed = replace(standing, faults={**standing.faults, node: after})
        changed.save()
        for enforce in dict.fromkeys(FAULT_KINDS[fault.kind].enforce for fault in (*before, *after)):
            enforce(changed.node(node), after)
        return changed


def _values(faults: Sequence[Fault], kind: str) -> list[str | None]:
    return [fault.value for fault in faults if fault.kind == kind]


def _check(node: Node, fault: Fault) -> None:
    kind, spec, value = _kind(fault.kind), node.testbed.spec, fault.value or ""
    if kind.value is None and fault.value is not None:
        raise ConfigError(f"fault {fault.kind} takes no value, got {value!r}")
    if kind.value is not None and not kind.value.startswith("[") and not value:
        raise ConfigError(f"fault {fault.kind} needs a value: {fault.kind} {kind.value}")
    if fault.kind == "link_down" and fault.value not in (None, *spec.interfaces):
        raise ConfigError(f"link_down {value!r}: {node.name} has the interfaces {', '.join(spec.interfaces)}")
    if fault.kind == "link_slow":
        parse_rate(value)
    if fault.kind == "disk_full" and try_command(node.inside("test", "-d", _parse_disk(value)[0])).returncode:
        raise ConfigError(f"disk_full: {node.name} has no folder {_parse_disk(value)[0]}")
    if fault.kind == "hardware":
        hardware_files(spec.hardware, node.name, node.number, (value,))


def _kind(name: str) -> FaultKind:
    if name not in FAULT_KINDS:
        raise ConfigError(f"no fault {name!r}; there are {', '.join(FAULT_KINDS)}")
    return FAULT_KINDS[name]


def _parse_disk(value: str | None) -> tuple[str, str | None]:
    """The folder, and how much space is left in it; None: none."""
    found = _DISK.fullmatch(value or "")
    if found is None or found[1] == "/":
        raise ConfigError(
            f"disk_full {value!r}: expected a folder, absolute, or FOLDER:SIZE such as /var/lib/docker:100m"
        )
    return found[1].rstrip("/"), found[2]
