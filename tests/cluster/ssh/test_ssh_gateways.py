"""Nodes behind others, by a real OpenSSH server: jump hosts, ProxyCommand, a log-in of ssh that is shared."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from own_sshd import Server, start_sshd
from testkit.connections import connect
from testkit.machine_clock import at_most
from testkit.waiting import wait_for

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host, fan_out, resolve_hosts
from cluster.ssh.session import SshConnection, SshPool
from engine.config.cluster import ClusterConfig, SshConfig


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def test_targets_share_one_log_in_at_their_jump_host(server: Server, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with start_sshd(tmp_path / "gate", "LogLevel VERBOSE") as gate, SshPool() as pool:
        hosts = [replace(server.host, name=f"n{number}", jump=gate.host) for number in range(4)]

        def work(host: Host) -> bytes:
            with pool.connect(host) as connection:
                return connection.run(["echo", host.name]).stdout

        found = fan_out(hosts, work)
        assert [outcome.value for outcome in found.values()] == [f"n{number}\n".encode() for number in range(4)]
        assert gate.log.read_text().count("Accepted publickey") == 1
        pool.close()
        wait_for(lambda: set(threading.enumerate()) <= before, "the end of the log-in there, too")


def test_a_jump_host_that_failed_is_tried_again_after_a_while_and_ends_with_the_pool(
    server: Server, tmp_path: Path
) -> None:
    with start_sshd(tmp_path / "gate") as gate, SshPool() as pool:
        host = replace(server.host, jump=replace(gate.host, connect_timeout_s=3.0))
        keys = gate.log.parent / "authorized_keys"
        kept = keys.rename(tmp_path / "kept")
        for _ in range(2):
            with pytest.raises(SshError, match="jump host node1: accepts none of our keys") as caught:
                pool.connect(host)
            assert caught.value.kind is SshFailure.AUTH
            kept.rename(keys) if kept.exists() else None
        connections: list[SshConnection] = []

        def is_in() -> bool:
            with contextlib.suppress(SshError):
                connections.append(pool.connect(host))
            return bool(connections)

        wait_for(is_in, "another try")
        assert connections[0].run(["echo", "in"]).stdout == b"in\n"
        pool.close()
        wait_for(lambda: not connections[0].transport.is_active(), "the end of what goes through the jump host")


@pytest.mark.parametrize("option", ["AllowTcpForwarding yes", "AllowTcpForwarding no"])
def test_what_a_jump_host_cannot_reach_is_told(tmp_path: Path, option: str) -> None:
    with start_sshd(tmp_path / "gate", option) as gate, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = replace(gate.host, name="behind", port=closed.getsockname()[1], jump=gate.host)
        with SshPool() as pool, pytest.raises(SshError, match=r"jump host node1 gives no way to 127\.0") as caught:
            pool.connect(target)
    assert caught.value.kind is SshFailure.UNREACHABLE
    assert ("prohibited" in str(caught.value)) == (option == "AllowTcpForwarding no")


def proxied(server: Server) -> Host:
    """The server as OpenSSH itself forwards it: a log-in of `ssh -W` in front."""
    folder, host = server.log.parent, server.host
    known = f"UserKnownHostsFile={folder}/known_hosts"
    words = ["ssh", "-F", "none", "-i", f"{folder}/id", "-o", known, "-p", str(host.port)]
    forward = ["-W", f"127.0.0.1:{host.port}", f"{host.user}@127.0.0.1"]
    return replace(host, address="known.only.behind", proxy_command=shlex.join([*words, *forward]))


def test_a_proxy_command_carries_a_connection_and_ends_with_it(server: Server) -> None:
    host = proxied(server)
    with connect(host) as connection:
        answer = connection.run(["head", "-c", "3000000"], stdin=bytes(3_000_000))
        assert (answer.exit_code, len(answer.stdout)) == (0, 3_000_000)
        assert len(proxies(server)) == 1
    assert proxies(server) == []


def test_a_proxy_command_that_ends_is_to_be_tried_by_hand(server: Server) -> None:
    with pytest.raises(SshError) as caught, connect(replace(server.host, proxy_command="echo 'no way' >&2; exit 3")):
        pass
    assert caught.value.kind is SshFailure.PROTOCOL
    assert "does plain `ssh` reach it?" in str(caught.value)


def test_proxy_command_that_fails_is_quoted(server: Server) -> None:
    command = "sh -c 'yes debug | head -n 100000 >&2; printf \"\\033[31mgateway: account expired\\n\" >&2; exit 3'"
    with pytest.raises(SshError, match=r"the ProxyCommand says: .*gateway: account expired") as caught:
        connect(replace(server.host, proxy_command=command)).close()
    assert len(str(caught.value)) < 1000, "a flood is cut"
    assert "\033" not in str(caught.value), "escape sequences are taken out"


def test_a_proxy_command_that_hangs_ends_with_the_deadline(server: Server) -> None:
    silent = f"tail -n 0 -f {server.log.parent}/known_hosts"
    with at_most(20), pytest.raises(SshError, match="stays silent"):
        connect(replace(server.host, proxy_command=silent, connect_timeout_s=1.0)).close()
    assert proxies(server) == []


def proxies(server: Server) -> list[int]:
    """Processes of ProxyCommands to the server."""
    mark = f"{server.log.parent}/known_hosts"
    return [one.pid for one in psutil.process_iter(["cmdline"]) if mark in " ".join(one.info["cmdline"] or ())]


def test_a_log_in_of_ssh_at_a_gateway_is_shared(server: Server, tmp_path: Path) -> None:
    # Paths of sockets are at most 107 bytes, those of tests are longer.
    with start_sshd(tmp_path / "gate", "LogLevel VERBOSE") as gate, TemporaryDirectory(dir="/tmp") as sockets:
        folder, host = gate.log.parent, gate.host
        key = shutil.copy(folder / "id", tmp_path / "one-time")
        config = tmp_path / "config"
        config.write_text(
            f"Host gate\n  HostName 127.0.0.1\n  Port {host.port}\n  User {host.user}\n  IdentityFile {key}\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  ControlPath {sockets}/%C\n"
            f"Host node1\n  HostName 127.0.0.1\n  Port {server.host.port}\n  ProxyJump gate\n"
            f"  IdentityFile {server.log.parent}/id\n  UserKnownHostsFile {server.log.parent}/known_hosts\n"
        )
        cluster = ClusterConfig(ssh=SshConfig(config_file=str(config)))
        (before,) = resolve_hosts(["node1"], cluster)
        assert before.jump is not None
        assert before.proxy_command is None
        command = ["ssh", "-F", str(config), "-o", "BatchMode=yes"]
        subprocess.run([*command, "-M", "-N", "-f", "gate"], check=True, stdin=subprocess.DEVNULL)
        try:
            Path(key).unlink()  # whoever has to log in at the gateway anew cannot
            (host,) = resolve_hosts(["node1"], cluster)
            with connect(host) as connection:
                assert connection.run(["echo", "in"]).stdout == b"in\n"
            with SshPool() as pool, pytest.raises(SshError, match="jump host gate: accepts none of our keys"):
                pool.connect(before)
            assert gate.log.read_text().count("Accepted publickey") == 1
        finally:
            subprocess.run([*command, "-O", "exit", "gate"], check=True, stderr=subprocess.DEVNULL)
