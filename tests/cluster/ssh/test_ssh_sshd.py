"""Connections to a real OpenSSH server: keys, quoting, streams, dead links, crowded doors; and that nothing leaks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from own_sshd import Server, agent_with, start_sshd
from testkit.connecting import connect
from testkit.machine_clock import machine_time

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.pool import SshConnection, SshPool

NASTY = [
    "$(id)",
    "`id`",
    "a'b\"c",
    "-n",
    "--",
    "",
    "two\nlines\r",
    "\\",
    "*",
    "~",
    "!!",
    "\x1b[2Jé\u202e",
    "|&;<>",
    "\udc80",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_sshd(tmp_path_factory.mktemp("sshd"), "MaxStartups 200") as server:
        yield server


@pytest.fixture(scope="module")
def connection(server: Server) -> Iterator[SshConnection]:
    with connect(server.host) as connection:
        yield connection


def test_a_command_gives_its_streams_and_its_exit_code(connection: SshConnection) -> None:
    result = connection.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in\xff\0put")
    assert (result.stdout, result.stderr, result.exit_code) == (b"in\xff\0put", b"err\n", 3)
    assert not result.ok
    assert connection.run(["sh", "-c", "kill -9 $$"]).exit_code is None


def test_a_connection_has_a_fast_cipher_and_the_kernel_ends_it_when_nothing_is_acknowledged(
    server: Server,
) -> None:
    with SshPool(keepalive_s=7.0) as pool, pool.connect(server.host) as connection:
        transport, tcp = connection.transport, socket.IPPROTO_TCP
        assert (transport.local_cipher, transport.remote_cipher) == ("aes128-gcm@openssh.com",) * 2
        assert transport.sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 21_000
        assert transport.sock.getsockopt(tcp, socket.TCP_NODELAY)


def test_no_word_is_interpreted_by_a_node(connection: SshConnection) -> None:
    result = connection.run(["printf", "%s\\0", "first", *NASTY])
    assert result.stdout.split(b"\0")[1:-1] == [word.encode("utf-8", "surrogateescape") for word in NASTY]


def test_large_streams_pass_in_both_directions_at_once(connection: SshConnection) -> None:
    data = os.urandom(1 << 20) * 4
    result = connection.run(["cat"], stdin=data)
    assert result.ok
    assert result.stdout == data


def test_a_flood_of_errors_is_cut_and_does_not_stop_the_output(connection: SshConnection) -> None:
    result = connection.run(["sh", "-c", "head -c 10000000 /dev/zero >&2; echo done"])
    assert result.stdout == b"done\n"
    assert (len(result.stderr), result.truncated) == (1 << 20, True)


def test_several_commands_share_a_connection(connection: SshConnection) -> None:
    all_run = threading.Barrier(8)

    def work(host: Host) -> bytes:
        process = connection.start(["cat"])
        all_run.wait(200)
        process.write(host.name.encode())
        process.close_stdin()
        return process.wait(200).stdout

    found = fan_out([connection.host.with_name(f"n{number}") for number in range(8)], work)
    assert [outcome.value for outcome in found.values()] == [f"n{number}".encode() for number in range(8)]


def test_a_process_is_written_to_and_read_from_by_hand(connection: SshConnection) -> None:
    process = connection.start(["cat"])
    process.write(b"one\n")
    assert process.read(100, 5) == b"one\n"
    with pytest.raises(SshError, match=r"within 0\.2 s"):
        process.read(100, 0.2)
    process.write(b"two\n")
    process.close_stdin()
    result = process.wait(200)
    assert (result.stdout, result.exit_code) == (b"two\n", 0)
    process.close()


def test_writing_after_the_end_of_input_is_an_error_and_no_loop(connection: SshConnection) -> None:
    process = connection.start(["sleep", "5"])
    process.close_stdin()
    with pytest.raises(SshError, match="no longer reads"):
        process.write(b"x")
    process.close()


def test_closing_from_another_thread_ends_a_read(connection: SshConnection) -> None:
    process = connection.start(["sleep", "30"])
    threading.Timer(0.2, process.close).start()
    begin = machine_time()
    assert process.read(100, 200) == b""
    assert machine_time() - begin < 5


@pytest.mark.parametrize("seconds", ["0", "0.5"])
def test_writing_to_a_command_that_ends_without_reading_is_told(connection: SshConnection, seconds: str) -> None:
    process = connection.start(["sleep", seconds])
    if seconds == "0":
        assert process.read(1, 200) == b""
    begin = machine_time()
    with pytest.raises(SshError, match="no longer reads") as caught:
        process.write(b"x" * (16 << 20))
    assert caught.value.kind is SshFailure.LOST
    assert machine_time() - begin < 5


def test_a_command_ends_with_its_limit_and_the_connection_lives_on(connection: SshConnection) -> None:
    begin = machine_time()
    with pytest.raises(SshError) as caught:
        connection.run(["sleep", "20"], timeout_s=0.3)
    assert caught.value.kind is SshFailure.COMMAND_TIMEOUT
    assert machine_time() - begin < 2
    assert connection.run(["echo", "on"]).stdout == b"on\n"


@pytest.mark.parametrize(("sign", "limit_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 5.0)])
def test_a_dead_link_is_noticed_while_a_command_runs(server: Server, sign: signal.Signals, limit_s: float) -> None:
    with SshPool(keepalive_s=0.3) as pool, pool.connect(server.host) as connection:
        # The parent of a command is the server process of this one connection.
        session = int(connection.run(["sh", "-c", "echo $PPID"]).stdout)
        process = connection.start(["sleep", "20"])
        os.kill(session, sign)
        try:
            begin = machine_time()
            with pytest.raises(SshError) as caught:
                process.wait(15)
            assert caught.value.kind is SshFailure.LOST
            assert machine_time() - begin < limit_s
            with pytest.raises(SshError, match="has ended"):
                connection.run(["true"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)


def test_keepalives_keep_a_quiet_connection(server: Server) -> None:
    with SshPool(keepalive_s=0.2) as pool, pool.connect(server.host) as connection:
        assert connection.run(["sh", "-c", "sleep 1.5; echo still"]).stdout == b"still\n"


def test_the_answer_to_a_sign_of_life_is_not_taken_for_that_to_a_request(server: Server) -> None:
    with SshPool(keepalive_s=0.5) as pool, pool.connect(server.host) as connection:
        session = int(connection.run(["sh", "-c", "echo $PPID"]).stdout)
        os.kill(session, signal.SIGSTOP)
        try:
            time.sleep(0.9)  # a sign of life has been asked for, and not answered
            with ThreadPoolExecutor(1) as threads:
                port = threads.submit(connection.forward, lambda channel: channel.close())
                time.sleep(0.2)
                os.kill(session, signal.SIGCONT)
                assert port.result(10) > 0
        finally:
            os.kill(session, signal.SIGCONT)


def test_a_server_with_several_keys_shows_the_one_that_is_known(server: Server, tmp_path: Path) -> None:
    kind, key = (server.log.parent / "host_rsa.pub").read_text().split()[:2]
    known = tmp_path / "known_hosts"
    known.write_text(f"{server.host.key_name} {kind} {key}\n")
    with connect(replace(server.host, known_hosts=(str(known),))) as connection:
        assert connection.transport.get_remote_server_key().get_name() == "ssh-rsa"


def test_keys_that_cannot_be_used_are_skipped_with_a_word(server: Server, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "passphrase", "-f", str(locked)], check=True)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff no key")
    files = (str(tmp_path / "none"), str(locked), str(garbage))
    with pytest.raises(SshError) as caught:
        connect(replace(server.host, identity_files=files))
    assert caught.value.kind is SshFailure.AUTH
    text = str(caught.value)
    assert f"{locked} (encrypted" in text
    assert f"{garbage} (not a private key" in text
    assert "none)" not in text
    assert str(tmp_path / "none") not in text
    with connect(replace(server.host, identity_files=(*files, *server.host.identity_files))):
        pass


def test_the_agents_keys_are_offered_unless_only_named_ones_may_be(server: Server, tmp_path: Path) -> None:
    key = Path(server.host.identity_files[0])
    with agent_with(tmp_path, key) as agent:
        bare = replace(server.host, identity_files=(), agent_socket=agent)
        with connect(bare) as connection:
            # No forwarding: a session of ours must not be a way to the agent.
            assert connection.run(["sh", "-c", "echo [$SSH_AUTH_SOCK]"]).stdout == b"[]\n"
        with pytest.raises(SshError, match="tried: none"):
            connect(replace(bare, identities_only=True))
        shutil.copy(f"{key}.pub", tmp_path / "id.pub")
        with connect(replace(bare, identities_only=True, identity_files=(str(tmp_path / "id"),))):
            pass


def test_an_agent_that_does_not_answer_is_done_without(server: Server) -> None:
    with TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as mute:  # tests' paths are too long
        mute.bind(f"{folder}/agent")
        mute.listen()
        for name, limit_s in (("none", 10.0), ("agent", 4.0)):
            connect(replace(server.host, agent_socket=f"{folder}/{name}", connect_timeout_s=limit_s)).close()


def test_a_server_that_drops_strangers_is_asked_again(tmp_path: Path) -> None:
    with start_sshd(tmp_path / "crowded", "MaxStartups 1") as server, contextlib.ExitStack() as stack:
        place = (server.host.address, server.host.port)
        stranger = stack.enter_context(socket.create_connection(place))
        while stranger.recv(4) != b"SSH-":  # until the server has forgotten who came before
            stranger = stack.enter_context(socket.create_connection(place))
        with pytest.raises(SshError, match="Exceeded MaxStartups"):
            connect(replace(server.host, connect_timeout_s=60))  # it gives up after some attempts, long before that
        threading.Timer(0.5, stranger.close).start()
        with connect(replace(server.host, connect_timeout_s=8)) as connection:
            assert connection.run(["echo", "in"]).stdout == b"in\n"


def test_a_second_factor_is_not_a_log_in(tmp_path: Path) -> None:
    with start_sshd(
        tmp_path / "two", "AuthenticationMethods publickey,password", "PasswordAuthentication yes"
    ) as server:
        with pytest.raises(SshError) as caught:
            connect(server.host)
        assert caught.value.kind is SshFailure.AUTH
        assert "password" in str(caught.value)


def test_a_secret_on_stdin_is_in_no_argument_and_no_error(connection: SshConnection) -> None:
    canary = "canary-7c1f93ab"
    process = connection.start(["sh", "-c", "read -r secret; sleep 5"])
    process.write(f"{canary}\n".encode())
    assert not any(canary.encode() in _command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    with pytest.raises(SshError) as caught:
        process.wait(0.2)
    process.close()
    with pytest.raises(SshError) as again:
        connection.run(["sleep", "5"], stdin=canary.encode(), timeout_s=0.2)
    assert canary not in repr(caught.value) + repr(again.value)


def _command_line(path: Path) -> bytes:
    with contextlib.suppress(OSError):  # a process that has just ended
        return path.read_bytes()
    return b""
