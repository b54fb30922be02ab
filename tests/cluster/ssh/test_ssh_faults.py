"""Faulty SSH servers: each is named with the right failure, in its own time, in bounded memory, whatever it sends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testkit.connections import connect
from testkit.fleet import FLOOD_BYTES, GARBAGE, Fleet, Mode, start_fleet
from testkit.machine_clock import at_most, machine_time

from benchmarks.bench_fleet import plan_modes, record_answer, run_verb
from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import OUTPUT_BYTES, CommandResult, Deadline
from cluster.ssh.hosts import Host, Outcome, fan_out, resolve_hosts
from cluster.ssh.session import SshConnection, SshPool, open_socket, reach
from cluster.ssh.transport import HostKeys, SshTransport
from engine.config.cluster import ClusterConfig, SshConfig

CONNECT_S = 4.0
COMMAND_S = 6.0
# Behind which jump host a node is, and what it does itself.
BEHIND: dict[str, tuple[str, Mode]] = {
    "behind": ("ok", "ok"),
    "behind-refuse": ("ok", "refuse"),
    "behind-wrong-key": ("ok", "wrong_key"),
    "behind-silent-gate": ("silent", "ok"),
    "behind-denying-gate": ("deny", "ok"),
}
JUMPS = {name: gate for name, (gate, _) in BEHIND.items()}
NODES = {mode.replace("_", "-"): mode for mode in get_args(Mode)} | {name: mode for name, (_, mode) in BEHIND.items()}
ANSWERS = {"ok": b"hello", "busy-door": b"hello", "slow": b"hello", "behind": b"hello", "garbage": GARBAGE}
FAILURES = {
    SshFailure.REFUSED: "refuse",
    SshFailure.TIMEOUT: "silent stall endless-banner mute-login behind-silent-gate",
    SshFailure.PROTOCOL: "not-ssh hang-up malformed",
    SshFailure.HOST_KEY_CHANGED: "wrong-key behind-wrong-key",
    SshFailure.HOST_KEY_UNKNOWN: "unknown-key",
    SshFailure.AUTH: "deny behind-denying-gate",
    SshFailure.COMMAND_TIMEOUT: "mute-exec deaf",
    SshFailure.LOST: "die malformed-exec",
    SshFailure.UNREACHABLE: "behind-refuse",
}
Checked = Mapping[str, Outcome[CommandResult]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with start_fleet(tmp_path_factory.mktemp("fleet"), NODES, jumps=JUMPS) as fleet:
        yield fleet


def hosts_of(fleet: Fleet, *names: str, connect_timeout_s: float = CONNECT_S) -> tuple[Host, ...]:
    ssh = SshConfig(config_file=str(fleet.config_file), connect_timeout_s=connect_timeout_s)
    return resolve_hosts(names, ClusterConfig(ssh=ssh))


@pytest.fixture(scope="module")
def checked(fleet: Fleet) -> Checked:
    """One command on every node at once, which takes as long as the slowest node and not the sum."""
    begin = machine_time()
    with SshPool() as pool:

        def work(host: Host) -> CommandResult:
            with pool.connect(host) as connection:
                return connection.run(["cat"], stdin=b"hello", timeout_s=COMMAND_S)

        outcomes = fan_out(hosts_of(fleet, *NODES), work)
    elapsed_s = machine_time() - begin
    assert elapsed_s < CONNECT_S + COMMAND_S + 2
    assert sum(outcome.elapsed_s for outcome in outcomes.values()) > 2 * elapsed_s
    return outcomes


@pytest.mark.parametrize("name", ANSWERS)
def test_healthy_and_merely_slow_nodes_answer(checked: Checked, name: str) -> None:
    value = checked[name].value
    assert value is not None, str(checked[name].error)
    assert (value.ok, value.stdout) == (True, ANSWERS[name])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FAILURES.items() for name in names.split()])
def test_every_fault_has_its_name(checked: Checked, kind: SshFailure, name: str) -> None:
    error = checked[name].error
    assert isinstance(error, SshError)
    assert (error.kind, error.host) == (kind, name), str(error)
    assert str(error).isprintable()
    assert name.endswith("-gate") <= str(error).startswith(f"{name}: jump host {JUMPS.get(name)}")
    said = {
        "hang-up": "its MaxStartups drops log-ins",
        "silent": "stays silent",
        "stall": "does not finish its handshake",
    }
    assert said.get(name, "") in str(error)
    has_run = kind in (SshFailure.COMMAND_TIMEOUT, SshFailure.LOST)
    assert checked[name].elapsed_s < CONNECT_S + COMMAND_S * has_run + 1


def test_the_key_of_a_connection_that_ended_after_the_handshake_is_still_told(fleet: Fleet) -> None:
    (host,) = hosts_of(fleet, "ok")
    deadline = Deadline.after(30.0)
    with contextlib.closing(SshTransport(open_socket(host, deadline))) as transport:
        transport.shake_hands(host, HostKeys(()), deadline)
        transport.close()
        assert transport.key_shown().kind == "ssh-ed25519"


def test_a_flood_is_read_to_its_end_and_cut_by_a_client_that_stays_small(fleet: Fleet) -> None:
    total, (host,) = 0, hosts_of(fleet, "flood")
    tracemalloc.start()
    with connect(host) as connection:
        process = connection.start(["x"])
        process.close_stdin()
        while data := process.read(1 << 16, 20):
            total += len(data)
        assert process.wait(200).exit_code == 0
        result = connection.run(["x"])
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == FLOOD_BYTES // 65536 * 65536
    assert (len(result.stdout), result.truncated, result.ok) == (OUTPUT_BYTES, True, False)
    assert peak < 64 << 20  # of 100 MiB that came twice


def test_a_server_that_ignores_the_window_is_left(fleet: Fleet) -> None:
    (host,) = hosts_of(fleet, "greedy")
    with connect(host) as connection:
        process = connection.start(["x"])
        process.close_stdin()
        connection.transport.join(60)  # nobody reads: what is sent beyond the window would fill memory
        assert not connection.transport.is_active()
        with pytest.raises(SshError) as caught:
            process.wait(200)
        assert caught.value.kind is SshFailure.LOST


def test_a_wish_for_a_port_never_takes_longer_than_its_limit_and_is_told_when_refused(fleet: Fleet) -> None:
    for name, kind, words in (
        ("mute-exec", SshFailure.COMMAND_TIMEOUT, "the server does not answer"),
        ("ok", SshFailure.PROTOCOL, "TCP forwarding request denied"),
    ):
        (host,) = hosts_of(fleet, name)
        with connect(host) as logged_in:
            connection = SshConnection(replace(host, connect_timeout_s=1.0), logged_in.transport, 30.0)
            with at_most(2), pytest.raises(SshError, match=f"cannot forward a port: {words}") as caught:
                connection.forward(lambda channel: None)
            assert caught.value.kind is kind


def test_a_dead_jump_host_is_waited_for_once(fleet: Fleet) -> None:
    (host,) = hosts_of(fleet, "behind-silent-gate", connect_timeout_s=1.0)
    hosts = [replace(host, name=f"node{number}") for number in range(6)]
    with at_most(3), SshPool() as pool:
        outcomes = fan_out(hosts, pool.connect, width=2)
    assert all(isinstance(outcome.error, SshError) for outcome in outcomes.values())
    assert "jump host silent" in str(outcomes["node5"].error)


@contextlib.contextmanager
def raw_server(answer: bytes) -> Iterator[Host]:
    """A server that sends `answer` to whoever connects, then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    guest, _ = listener.accept()
                    guests.append(guest)
                    guest.sendall(answer)

        guests: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Host("raw", "127.0.0.1", listener.getsockname()[1], connect_timeout_s=0.3)
        listener.shutdown(socket.SHUT_RDWR)
        for guest in guests:
            guest.close()


@example(struct.pack(">IB", 12, 4) + b"\x14" + b"\xff" * 10)
@example(struct.pack(">IB", 12, 4) + b"\x01" + b"\xff" * 10)
@given(st.binary(max_size=80))
@settings(max_examples=12, deadline=None)
def test_no_message_of_a_stranger_is_a_bug_of_ours(noise: bytes) -> None:
    with raw_server(b"SSH-2.0-strange\r\n" + noise) as host:
        with at_most(2), pytest.raises(SshError) as caught:
            connect(host)
        assert caught.value.kind in (SshFailure.PROTOCOL, SshFailure.TIMEOUT)


def test_a_packet_is_not_longer_than_ssh_has_them() -> None:
    deadline, said = Deadline.after(30.0), b"SSH-2.0-strange\r\n\xff\xff\xff\xfc\x04\0\0\0"
    with (
        raw_server(said) as host,
        contextlib.closing(SshTransport(open_socket(host, deadline))) as transport,
        pytest.raises(SshError, match=r"a packet of \d{10} bytes is not SSH"),
    ):
        transport.shake_hands(host, HostKeys(()), deadline)


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """The port of a listener on 127.0.0.1 that accepts nobody: its queue is full, as that of a machine that hangs."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_an_address_that_hangs_leaves_time_for_the_next_and_ends_with_the_deadline() -> None:
    with full_listener() as port, socket.create_server(("127.0.0.2", port)):
        host, deadline = Host("node1", "127.0.0.1", port), Deadline.after(4)
        with reach(host, [("127.0.0.1", port), ("127.0.0.2", port)], deadline) as sock:
            assert not deadline.is_over
            assert sock.getpeername()[0] == "127.0.0.2"
        with at_most(1.5), pytest.raises(SshError) as caught:
            open_socket(host, Deadline.after(0.3))
        assert caught.value.kind is SshFailure.TIMEOUT


def test_the_next_address_is_tried_when_one_fails_and_the_most_telling_failure_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def tried(*addresses: str) -> socket.socket:
            return reach(Host("node1", "n", port), [(address, port) for address in addresses], Deadline.after(5))

        for first in ("127.0.0.2", "::1", "255.255.255.255"):
            with tried(first, "127.0.0.1") as sock:
                assert sock.getpeername() == ("127.0.0.1", port)
        for addresses in (("255.255.255.255", "127.0.0.2"), ("127.0.0.2", "255.255.255.255")):
            with pytest.raises(SshError, match="refuses connections"):
                tried(*addresses)
        for address, kind, words in (
            ("nowhere.invalid", SshFailure.DNS, "has no address that is known here"),
            ("255.255.255.255", SshFailure.UNREACHABLE, "255.255.255.255 port"),
        ):
            with pytest.raises(SshError, match=words) as caught:
                open_socket(Host("node1", address, port), Deadline.after(5))
            assert caught.value.kind is kind


@pytest.mark.thorough
def test_512_nodes_are_checked_within_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    modes = plan_modes(512)
    faulty = sorted(name for name, mode in modes.items() if mode != "ok")
    assert len(faulty) >= 512 // 20
    with start_fleet(tmp_path / "fleet", modes, record=record_answer()) as fleet:
        turn = run_verb(fleet.config_file, fleet.names, 5.0)
    assert sorted(turn.failed) == faulty
    assert turn.answers == 512 - len(faulty)
    assert turn.elapsed_s < 30.0
    assert turn.peak_rss_bytes < 250e6
