"""The running parts of one node: a process that holds its namespaces, its sshd, its Docker engine."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.testbed.folder import NodeFolder, TestbedError, TestbedState
from cluster.testbed.machine import last_lines, run_command, tool_path, try_command, wait_until
from cluster.testbed.templates import render
from cluster.testbed.texts import MARK_VARIABLE, SSH_USER, control_group, passwd_text, session_environment
from engine.runs.process import process_start

NAMESPACES = Path("/run/netns")
_DOCKER_STOP_S = 20.0
_HOLD = Path(__file__).with_name("hold.sh")
# No password, but not locked either: sshd lets nobody into a locked account.
_SHADOW = "".join(f"{user}:*:19000:0:99999:7:::\n" for user in (SSH_USER, "sshd"))


class Service(enum.StrEnum):
    """How a daemon of a node looks from outside."""

    UP = "up"
    SILENT = "silent"  # it accepts and says nothing
    REFUSED = "refused"  # nobody listens
    UNREACHABLE = "unreachable"  # nobody answers
    DOWN = "down"
    NONE = "none"  # not part of this testbed


@dataclass(frozen=True)
class Node:
    """A node of the testbed `state`, with its folder."""

    state: TestbedState
    name: str
    folder: NodeFolder

    @property
    def address(self) -> str:
        """Its address in the management network."""
        return self.state.network.address(self.name)

    def files(self, client_key: str, passwd: str, sshd_options: tuple[str, ...] = ()) -> dict[Path, str]:
        """The text of every file of the node but its host key. `passwd`: this machine's /etc/passwd."""
        folder, spec = self.folder, self.state.spec
        environment = session_environment(self.state, self.name, folder)
        files = {
            folder.etc / "hosts": render("hosts", spec=spec, network=self.state.network),
            folder.etc / "hostname": f"{self.name}\n",
            folder.etc / "resolv.conf": "nameserver 127.0.0.1\n",
            folder.etc / "passwd": passwd_text(passwd, str(folder.home)),
            folder.etc / "shadow": _SHADOW,
            folder.authorized_keys: client_key,
            folder.ssh / "sshd_config": render(
                "sshd_config", folder=folder, user=SSH_USER, extra=sshd_options, environment=environment
            ),
        }
        if spec.docker:
            group = control_group(spec.name)
            files[folder.docker / "daemon.json"] = render("daemon.json", spec=spec, folder=folder, group=group)
        return files

    def host_key(self) -> str:
        """Its known_hosts line."""
        kind, key = (self.folder.ssh / "host_key.pub").read_text(encoding="utf-8").split()[:2]
        return f"{self.name} {kind} {key}\n"

    @property
    def fake(self) -> Path:
        """The folder of its fake /sys, /proc, ... as it is reached from outside of the node."""
        return Path(f"/proc/{self.holder()}/root{self.folder.fake}")

    def hold_command(self) -> tuple[str, ...]:
        """What starts the process whose mount and UTS namespaces are the node's."""
        disk = str(self.folder.docker / "data") if self.state.spec.docker_in_memory else ""
        argv = ("setsid", "--fork", "nsenter", f"--net={self._namespace}", "unshare", "--mount", "--uts")
        return (*argv, "sh", str(_HOLD), self.name, str(self.folder.path), disk)

    def sshd_command(self) -> tuple[str, ...]:
        """What starts sshd, inside the node."""
        return (tool_path("sshd"), "-f", str(self.folder.ssh / "sshd_config"), "-E", str(self.folder.sshd_log))

    def docker_command(self) -> tuple[str, ...]:
        """What starts the Docker engine, inside the node."""
        return ("setsid", "--fork", tool_path("dockerd"), "--config-file", str(self.folder.docker / "daemon.json"))

    def start_holder(self) -> None:
        """Start the process that holds the namespaces; `wait_for_holder` says when they are complete."""
        run_command(self.hold_command(), environment=self._environment, log=self.folder.holder_log)

    def wait_for_holder(self) -> None:
        """Return as soon as the node's namespaces are complete."""

        def complete() -> bool:
            if (self.folder.path / "holder.failed").exists():
                raise TestbedError(f"{self.name}: cannot set up its namespaces: {last_lines(self.folder.holder_log)}")
            return self.folder.holder_pid.exists()

        wait_until(complete, f"{self.name}: its namespaces", self.folder.holder_log)

    def inside(self, *argv: str) -> tuple[str, ...]:
        """`argv` as it runs inside the node."""
        return ("nsenter", f"--target={self.holder()}", "--net", "--mount", "--uts", *argv)

    def holder(self) -> int:
        """Number of the process that holds the namespaces; TestbedError when it is gone."""
        pid = self.pid_of(self.folder.holder_pid)
        if pid is None:
            raise TestbedError(f"{self.name} is gone; remove what is left: burst testbed down --name {self._testbed}")
        return pid

    def start_sshd(self) -> None:
        """Start sshd; `wait_for_sshd` says when it answers."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        run_command(self.inside(*self.sshd_command()), environment=self._environment)

    def wait_for_sshd(self) -> None:
        """Return as soon as sshd answers."""
        wait_until(lambda: self.sshd_service(0.5) is Service.UP, f"{self.name}: sshd", self.folder.sshd_log)

    def stop_sshd(self) -> None:
        """End the listener; sessions go on."""
        pid = self.sshd_pid()
        if pid is not None:
            stop_process(pid, signal.SIGKILL, timeout_s=5)
        self.folder.sshd_pid.unlink(missing_ok=True)

    def sshd_pid(self) -> int | None:
        """Number of the listener, None when none runs."""
        return self.pid_of(self.folder.sshd_pid)

    def sshd_service(self, timeout_s: float) -> Service:
        """What of an SSH server is at its address."""
        try:
            connection = socket.create_connection((self.address, 22), timeout_s)
        except ConnectionRefusedError:
            return Service.REFUSED
        except OSError:
            return Service.UNREACHABLE
        with connection, contextlib.suppress(OSError):
            connection.settimeout(timeout_s)
            return Service.UP if connection.recv(4) == b"SSH-" else Service.SILENT
        return Service.SILENT

    def start_docker(self) -> None:
        """Start the Docker engine; `wait_for_docker` says when it answers."""
        run_command(self.inside(*self.docker_command()), environment=self._environment, log=self.folder.docker_log)

    def wait_for_docker(self) -> None:
        """Return as soon as the Docker engine answers."""
        wait_until(self.docker_answers, f"{self.name}: the Docker engine", self.folder.docker_log)

    def stop_docker(self) -> None:
        """End the Docker engine and its containers in good order; its images stay."""
        pid = self.pid_of(self.folder.docker_pid)
        if pid is not None and not stop_process(pid, signal.SIGTERM, timeout_s=_DOCKER_STOP_S):
            stop_process(pid, signal.SIGKILL, timeout_s=5)
        for path in (self.folder.docker_pid, self.folder.docker_socket):
            path.unlink(missing_ok=True)

    def docker_answers(self) -> bool:
        """Whether the Docker engine answers /_ping with OK."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(self.folder.docker_socket))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return connection.recv(64).startswith((b"HTTP/1.0 200", b"HTTP/1.1 200"))
        return False

    @property
    def stands(self) -> bool:
        """Whether its network namespace is there; after a restart of the machine only the files are."""
        return self._namespace.exists()

    def pid_of(self, pid_file: Path) -> int | None:
        """The live process of a pid file, if it is in this node's network namespace: pids are used again."""
        try:
            pid = int(pid_file.read_text())
            inside = os.path.samestat(Path(f"/proc/{pid}/ns/net").stat(), self._namespace.stat())
        except (OSError, ValueError):
            return None
        return pid if inside and process_start(pid) is not None else None

    @property
    def _namespace(self) -> Path:
        return NAMESPACES / self.state.network.namespace(self.name)

    @property
    def _testbed(self) -> str:
        return self.state.spec.name

    @property
    def _environment(self) -> dict[str, str]:
        return {MARK_VARIABLE: self._testbed, "HOME": str(self.folder.home)}


def make_key(path: Path, comment: str) -> None:
    """Make a key pair at `path` and `path`.pub in the place of any that is there."""
    path.unlink(missing_ok=True)
    run_command(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)))


def stop_process(pid: int, number: signal.Signals, *, timeout_s: float) -> bool:
    """Whether the process is gone within `timeout_s` of the signal. One that nobody has reaped counts as gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + timeout_s
    while process_start(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def sshd_options(any_key: Path) -> tuple[str, ...]:
    """Options that only newer versions of sshd know, and need: without them they punish a client for what faults do.

    any_key: sshd looks at no option without a host key.
    """
    known = try_command((tool_path("sshd"), "-t", "-f", os.devnull, "-h", str(any_key), "-o", "PerSourcePenalties=no"))
    return ("PerSourcePenalties no",) if known.returncode == 0 else ()
