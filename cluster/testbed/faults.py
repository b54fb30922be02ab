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

from cluster.testbed.build import Testbed, open_testbed
from cluster.testbed.folder import Fault, TestbedError, locked
from cluster.testbed.hardware.files import hardware_files, lay_hardware
from cluster.testbed.machine import run_command, try_command
from cluster.testbed.node import Node, make_key
from cluster.testbed.spec import parse_rate
from cluster.testbed.texts import SSH_USER, login_shell, passwd_text, slow_shell_text
from engine.config.errors import ConfigError

_DISK_SOURCE = "burst-fault"  # names our mounts
_DISK = re.compile(r"(/[^\0\n]*?)(?::([0-9]+[kmg]))?")
_FULL_KIB = 64


@dataclass(frozen=True)
class FaultKind:
    """One switch. value: what its value is called, in brackets where it may be left out; None without.

    several: they may be in force with different values.
    """

    enforce: Callable[[Node, Sequence[Fault]], None]
    value: str | None = None
    several: bool = False


def _links(node: Node, faults: Sequence[Fault]) -> None:
    network, interfaces = node.state.network, node.state.spec.interfaces
    values = {fault.value for fault in faults if fault.kind == "link_down"}
    cut = interfaces if None in values else values
    for interface in interfaces:
        run_command(network.link_command(node.name, interface, up=interface not in cut))


def _rates(node: Node, faults: Sequence[Fault]) -> None:
    slow = next((fault.value for fault in faults if fault.kind == "link_slow"), None)
    rate = parse_rate(slow) if slow else node.state.spec.rate_bits_per_s
    for command in node.state.network.shape_commands(node.name, rate):
        done = try_command(command)
        if done.returncode and rate is not None:
            raise TestbedError(f"{node.name}: cannot shape its links: {done.stderr.strip()}")


def _sshd(node: Node, faults: Sequence[Fault]) -> None:
    kinds = {fault.kind for fault in faults}
    if _swap_host_key(node.folder.ssh, swapped="key_swap" in kinds):
        node.stop_sshd()
    if "sshd_stop" in kinds:
        node.stop_sshd()
        return
    if node.sshd_pid() is None:
        node.start_sshd()
        node.wait_for_sshd()
    pid = node.sshd_pid()
    if pid is not None:
        os.kill(pid, signal.SIGSTOP if "sshd_hang" in kinds else signal.SIGCONT)


def _swap_host_key(ssh: Path, *, swapped: bool) -> bool:
    """Whether the host key had to change. The true one waits beside it; nobody's known_hosts is touched."""
    key, true_key = ssh / "host_key", ssh / "host_key.true"
    if swapped == true_key.exists():
        return False
    if swapped:
        key.rename(true_key)
        make_key(key, "swapped")
    else:
        true_key.rename(key)
        (ssh / "host_key.pub").unlink(missing_ok=True)
    return True


def _login(node: Node, faults: Sequence[Fault]) -> None:
    refused = any(fault.kind == "login_refused" for fault in faults)
    key = node.folder.testbed.client_key.with_suffix(".pub").read_text(encoding="utf-8")
    node.folder.authorized_keys.write_text("" if refused else key, encoding="utf-8")


def _shell(node: Node, faults: Sequence[Fault]) -> None:
    passwd = Path("/etc/passwd").read_text(encoding="utf-8")
    slow = next((fault.value for fault in faults if fault.kind == "slow_shell"), None)
    shell = node.folder.path / "slow_shell"
    if slow is not None:
        own = next(line.split(":")[6] for line in passwd.splitlines() if line.startswith(f"{SSH_USER}:"))
        shell.write_text(slow_shell_text(login_shell(own), float(slow)))
        shell.chmod(0o755)
    # Written in place: it is mounted over the node's /etc/passwd, and a new file would not be seen there.
    text = passwd_text(passwd, str(node.folder.home), str(shell) if slow is not None else None)
    (node.folder.etc / "passwd").write_text(text)


def _disks(node: Node, faults: Sequence[Fault]) -> None:
    wanted = dict(_parse_disk(fault.value or "") for fault in faults if fault.kind == "disk_full")
    mounted = _fault_mounts(node)
    for path in mounted:
        if path not in wanted:
            run_command(node.inside("umount", "-l", path))
    for path, free in wanted.items():
        if path in mounted:
            continue
        size = free or f"{_FULL_KIB}k"
        run_command(node.inside("mount", "-t", "tmpfs", "-o", f"size={size}", _DISK_SOURCE, path))
        if free is None:
            # Ends with "no space left on device": that is what it is for.
            try_command(node.inside("dd", "if=/dev/zero", f"of={path}/full", "bs=4k", f"count={_FULL_KIB}"))


def _fault_mounts(node: Node) -> list[str]:
    """Folders of the node on which a full disk of ours is mounted."""
    listing = try_command(node.inside("findmnt", "--json", "--list", "--source", _DISK_SOURCE, "--output", "TARGET"))
    return [mount["target"] for mount in json.loads(listing.stdout or '{"filesystems": []}')["filesystems"]]


def _hardware(node: Node, faults: Sequence[Fault]) -> None:
    lay_hardware(node, tuple(fault.value or "" for fault in faults if fault.kind == "hardware"))


def _docker(node: Node, faults: Sequence[Fault]) -> None:
    if any(fault.kind == "docker_stop" for fault in faults):
        node.stop_docker()
    elif not node.docker_answers():
        node.stop_docker()
        node.start_docker()
        node.wait_for_docker()


FAULT_KINDS = {
    "link_down": FaultKind(_links, "[INTERFACE]", several=True),
    "link_slow": FaultKind(_rates, "RATE"),
    "sshd_stop": FaultKind(_sshd),
    "sshd_hang": FaultKind(_sshd),
    "key_swap": FaultKind(_sshd),
    "login_refused": FaultKind(_login),
    "slow_shell": FaultKind(_shell, "SECONDS"),
    "disk_full": FaultKind(_disks, "PATH[:FREE]", several=True),
    "docker_stop": FaultKind(_docker),
    "hardware": FaultKind(_hardware, "FAULT", several=True),
}


def set_fault(testbed: Testbed, node: str, kind: str, value: str | None = None) -> Testbed:
    """The testbed with this fault on `node` beside those that are there; of a kind that can be only once, it replaces.

    Raises ConfigError for a kind or value that makes no sense. Tells nothing to whoever is connected.
    """
    fault = Fault(kind, value)
    _check(testbed.node(node), fault)

    def add(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        several = FAULT_KINDS[kind].several
        return (*(old for old in faults if (old != fault if several else old.kind != kind)), fault)

    return _change(testbed, node, add)


def clear_faults(testbed: Testbed, node: str, kind: str | None = None, value: str | None = None) -> Testbed:
    """The testbed without the faults of `node`: all of them, those of a kind, or that of a kind with a value."""
    testbed.node(node)
    if kind is not None:
        _kind(kind)

    def keep(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        return tuple(
            fault for fault in faults if (kind not in (None, fault.kind)) or (value not in (None, fault.value))
        )

    return _change(testbed, node, keep)


def _change(testbed: Testbed, node: str, change: Callable[[tuple[Fault, ...]], tuple[Fault, ...]]) -> Testbed:
    with locked(testbed.folder.path):
        standing = open_testbed(testbed.name)
        before = standing.state.faults.get(node, ())
        after = change(before)
        # Written down first: what fails half-way is then known, and can be cleared.
        state = standing.state.with_faults(node, after)
        testbed.folder.save(state)
        for enforce in dict.fromkeys(FAULT_KINDS[fault.kind].enforce for fault in (*before, *after)):
            enforce(standing.node(node), after)
        return replace(standing, state=state)


def _check(node: Node, fault: Fault) -> None:
    kind, spec = _kind(fault.kind), node.state.spec
    if kind.value is None and fault.value is not None:
        raise ConfigError(f"fault {fault.kind} takes no value, got {fault.value!r}")
    if kind.value is not None and not kind.value.startswith("[") and not fault.value:
        raise ConfigError(f"fault {fault.kind} needs a value: {fault.kind} {kind.value}")
    if fault.kind == "link_down" and fault.value not in (None, *spec.interfaces):
        raise ConfigError(f"link_down {fault.value!r}: {node.name} has the interfaces {', '.join(spec.interfaces)}")
    if fault.kind == "link_slow":
        parse_rate(fault.value or "")
    if fault.kind == "slow_shell" and not re.fullmatch(r"\d{1,4}(\.\d+)?", fault.value or ""):
        raise ConfigError(f"slow_shell {fault.value!r}: expected seconds, such as 5 or 0.5")
    if fault.kind == "disk_full":
        path, _ = _parse_disk(fault.value or "")
        if try_command(node.inside("test", "-d", path)).returncode:
            raise ConfigError(f"disk_full: {node.name} has no folder {path}")
    if fault.kind == "docker_stop" and not spec.docker:
        raise ConfigError("docker_stop: the nodes of this testbed have no Docker engine; build one with up --docker")
    if fault.kind == "hardware":
        hardware_files(spec.hardware, node.name, node.state.network.number(node.name), (fault.value or "",))


def _kind(name: str) -> FaultKind:
    if name not in FAULT_KINDS:
        raise ConfigError(f"no fault {name!r}; there are {', '.join(FAULT_KINDS)}")
    return FAULT_KINDS[name]


def _parse_disk(value: str) -> tuple[str, str | None]:
    """The folder, and how much space is left in it; None: none."""
    found = _DISK.fullmatch(value)
    if found is None or found[1] == "/":
        raise ConfigError(
            f"disk_full {value!r}: expected a folder, absolute, or FOLDER:SIZE such as /var/lib/docker:100m"
        )
    return found[1].rstrip("/"), found[2]
