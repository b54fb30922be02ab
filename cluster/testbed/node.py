"""The daemons of one node, as values: what starts each, how it shows that it works, how it ends."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.hardware.files import FakeFile, hardware_files
from cluster.testbed.machine import Command, TestbedError, run_command, tool_path, wait_until
from cluster.testbed.testbed import SSH_USER, Node
from engine.runs.process import process_start

_END_S = 5.0
# Paths below the fake root that stay the node's own: probes read them, and no hardware is fake there.
_NOT_FAKED = ("etc/nccl.conf", "proc/mounts", "proc/net")


class Service(enum.StrEnum):
    """How a daemon of a node looks from outside."""

    UP = "up"
    SILENT = "silent"  # it accepts and says nothing
    REFUSED = "refused"  # nobody listens
    UNREACHABLE = "unreachable"  # nobody answers
    DOWN = "down"
    NONE = "none"  # not part of this testbed


@dataclass(frozen=True)
class Daemon:
    """A daemon of `node`. command: what starts it in the background, inside."""

    what: str
    node: Node
    command: Command
    pid_file: Path
    log: Path
    answers: Callable[[], bool]

    def pid(self) -> int | None:
        """Its live process, if it is in the node's network namespace: pids are used again."""
        try:
            pid = int(self.pid_file.read_text())
            inside = os.path.samestat(Path(f"/proc/{pid}/ns/net").stat(), self.node.namespace.stat())
        except (OSError, ValueError):
            return None
        return pid if inside and process_start(pid) is not None else None

    def start(self) -> None:
        """Start it; `wait` says when it answers."""
        run_command(self.node.inside(*self.command), self.node.testbed.name)

    def wait(self) -> None:
        """Return as soon as it answers."""
        wait_until(self.answers, f"{self.node.name}: {self.what}", self.log)

    def kill(self) -> None:
        """End it at once. What it left running goes on."""
        deadline = time.monotonic() + _END_S
        while (pid := self.pid()) is not None:
            if time.monotonic() > deadline:
                raise TestbedError(f"{self.node.name}: {self.what} (process {pid}) does not end")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.pid_file.unlink(missing_ok=True)


def sshd(node: Node) -> Daemon:
    """Its SSH server; sessions outlive it."""
    log = node.ssh / "sshd.log"
    command = (tool_path("sshd"), "-f", str(node.ssh / "sshd_config"), "-E", str(log))
    return Daemon("sshd", node, command, node.ssh / "sshd.pid", log, lambda: sshd_service(node, 0.5) is Service.UP)


def docker(node: Node) -> Daemon:
    """Its Docker engine; images outlive it."""
    config, log = node.docker / "daemon.json", node.docker / "dockerd.log"
    line = f"exec {tool_path('dockerd')} --config-file {config} >>{log} 2>&1"
    return Daemon(
        "the Docker engine",
        node,
        ("setsid", "--fork", "sh", "-c", line),
        node.docker / "docker.pid",
        log,
        lambda: docker_answers(node),
    )


def sshd_service(node: Node, timeout_s: float) -> Service:
    """What of an SSH server is at its address."""
    try:
        connection = socket.create_connection((node.address, 22), timeout_s)
    except ConnectionRefusedError:
        return Service.REFUSED
    except OSError:
        return Service.UNREACHABLE
    with connection, contextlib.suppress(OSError):
        connection.settimeout(timeout_s)
        return Service.UP if connection.recv(4) == b"SSH-" else Service.SILENT
    return Service.SILENT


def docker_answers(node: Node) -> bool:
    """Whether the Docker engine answers /_ping with OK."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(str(node.docker_socket))
        connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        return connection.recv(64).startswith((b"HTTP/1.0 200", b"HTTP/1.1 200"))
    return False


def passwd_text(passwd: str, home: str) -> str:
    """`passwd` with another home for the SSH user, so that keys and caches of a node are its own, and a shell that lets
    it in."""
    lines = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == SSH_USER:
            fields[5] = home
            if not fields[6] or fields[6].endswith(("nologin", "false")):
                fields[6] = "/bin/sh"
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def lay_hardware(node: Node, faults: Iterable[str] = ()) -> None:
    """Put the files of the node's hardware, with these faults, in the place of those that are there."""
    files = hardware_files(node.testbed.spec.hardware, node.name, node.number, faults)
    if files:
        files |= {f"root/{path}": FakeFile(link_to=f"/{path}") for path in _NOT_FAKED}
    places = {"root": node.fake, "bin": node.bin}
    for path in places.values():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    for name, file in files.items():
        place, _, rest = name.partition("/")
        file.write(places[place] / rest)
