"""Commands on a real OpenSSH server: quoting, streams, limits, dead links, crowded doors; and that nothing leaks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from own_sshd import Server, start_sshd
from testkit.connections import connect
from testkit.machine_clock import at_most

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.session import SshConnection, SshPool

NASTY = [
    *["$(id)", "`id`", "a'b\"c", "-n", "--", "", "two\nlines\r", "\\", "*", "~", "!!", "|&;<>"],
    *["\x1b[2Jé\u202e", "\udc80"],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_sshd(tmp_path_factory.mktemp("sshd"), "MaxStartups 200") as server:
        yield server


@pytest.fixture(scope="module")
def connection(server: Server) -> Iterator[SshConnection]:
    with connect(server.host) as connection:
        yield connection


def session_pid(connection: SshConnection) -> int:
    """The server process of this one connection: the parent of the shell that a command runs in."""
    return int(connection.run(["sh", "-c", "cut -d' ' -f4 /proc/$PPID/stat"]).stdout)


def test_a_command_gives_its_streams_and_its_exit_code(connection: SshConnection) -> None:
    result = connection.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in\xff\0put")
    assert (result.stdout, result.stderr, result.exit_code) == (b"in\xff\0put", b"err\n", 3)
    assert not result.ok
    assert connection.run(["sh", "-c", "kill -9 $$"]).exit_code is None


def test_a_connection_has_a_fast_cipher_and_the_kernel_ends_it_when_nothing_is_acknowledged(server: Server) -> None:
    with SshPool(patience_s=21.0) as pool:
        connection = pool.connect(server.host)
        transport, tcp = connection.transport, socket.IPPROTO_TCP
        assert (transport.local_cipher, transport.remote_cipher) == ("aes128-gcm@openssh.com",) * 2
        assert transport.sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 21_000
        assert transport.sock.getsockopt(tcp, socket.TCP_NODELAY)
        assert transport.is_active()
    assert not transport.is_active()


def test_no_word_is_interpreted_by_a_node(connection: SshConnection) -> None:
    result = connection.run(["printf", "%s\\0", "first", *NASTY])
    assert result.stdout.split(b"\0")[1:-1] == [word.encode("utf-8", "surrogateescape") for word in NASTY]


def test_large_streams_pass_in_both_directions_at_once(connection: SshConnection) -> None:
    data = os.urandom(1 << 20) * 4
    result = connection.run(["cat"], stdin=data)
    assert (result.ok, result.stdout) == (True, data)


def test_a_flood_of_errors_is_cut_and_does_not_stop_the_output(connection: SshConnection) -> None:
    result = connection.run(["sh", "-c", "head -c 10000000 /dev/zero >&2; echo done"])
    assert (result.stdout, len(result.stderr), result.truncated) == (b"done\n", 1 << 20, True)


def test_several_commands_share_a_connection(connection: SshConnection) -> None:
    all_run = threading.Barrier(8)

    def work(host: Host) -> bytes:
        process = connection.start(["cat"])
        all_run.wait(200)
        process.write(host.name.encode())
        process.close_stdin()
        return process.wait(200).stdout

    found = fan_out([replace(connection.host, name=f"n{number}") for number in range(8)], work)
    assert [outcome.value for outcome in found.values()] == [f"n{number}".encode() for number in range(8)]


def test_a_process_is_written_to_and_read_from_by_hand(connection: SshConnection) -> None:
    process = connection.start(["cat"])
    process.write(b"one\n")
    assert process.read(100, 5) == b"one\n"
    with pytest.raises(SshError, match=r"within 0\.2 s"):
        process.read(100, 0.2)
    process.write(b"two\n")
    process.close_stdin()
    with pytest.raises(SshError, match="no longer reads"):
        process.write(b"x")
    result = process.wait(200)
    assert (result.stdout, result.exit_code) == (b"two\n", 0)
    process.close()


def test_closing_from_another_thread_ends_a_read(connection: SshConnection) -> None:
    process = connection.start(["sleep", "30"])
    threading.Timer(0.2, process.close).start()
    with at_most(5):
        assert process.read(100, 200) == b""


@pytest.mark.parametrize(("seconds", "words"), [("0", ""), ("0.5", ""), ("30", r" \(for 1\.5 s\)")])
def test_writing_to_a_command_that_does_not_read_is_told(server: Server, seconds: str, words: str) -> None:
    with SshPool(patience_s=1.5) as pool, pool.connect(server.host) as connection:
        process = connection.start(["sleep", seconds])
        if seconds == "0":
            assert process.read(1, 200) == b""
        with at_most(5), pytest.raises(SshError, match=f"no longer reads its input{words}$") as caught:
            process.write(b"x" * (16 << 20))
        assert caught.value.kind is SshFailure.LOST


def test_a_command_ends_with_its_limit_whatever_it_reads_and_the_connection_lives_on(connection: SshConnection) -> None:
    with at_most(1.5), pytest.raises(SshError, match=r"within 0\.3 s") as caught:
        connection.run(["sleep", "20"], stdin=b"x" * (8 << 20), timeout_s=0.3)
    assert caught.value.kind is SshFailure.COMMAND_TIMEOUT
    assert connection.run(["echo", "on"]).stdout == b"on\n"


def test_the_end_of_a_connection_is_noticed_while_a_command_runs(server: Server) -> None:
    with connect(server.host) as connection:
        session = session_pid(connection)
        process = connection.start(["sleep", "20"])
        os.kill(session, signal.SIGKILL)
        with at_most(2):
            for work in (lambda: process.read(1, 15), lambda: process.wait(15), lambda: connection.run(["true"])):
                with pytest.raises(SshError, match="the connection ended") as caught:
                    work()
                assert caught.value.kind is SshFailure.LOST


def test_a_server_that_stopped_is_waited_for_no_longer_than_allowed(server: Server) -> None:
    with connect(replace(server.host, connect_timeout_s=2.0)) as connection:
        session = session_pid(connection)
        process = connection.start(["cat"])
        os.kill(session, signal.SIGSTOP)
        try:
            for work, limit_s in ((lambda: process.read(1, 0.5), 1.5), (lambda: connection.run(["true"]), 4.0)):
                with at_most(limit_s), pytest.raises(SshError) as caught:
                    work()
                assert caught.value.kind is SshFailure.COMMAND_TIMEOUT
        finally:
            os.kill(session, signal.SIGCONT)


def test_keepalives_keep_a_quiet_connection(tmp_path: Path) -> None:
    with start_sshd(tmp_path / "sshd", "LogLevel DEBUG1") as server, SshPool(patience_s=1.2) as pool:
        connection = pool.connect(server.host)
        result = connection.run(["sh", "-c", "sleep 1.5; echo still; echo late >&2"])
        assert (result.stdout, result.stderr) == (b"still\n", b"late\n")
        assert connection.forward(lambda channel: channel.close()) > 0  # no answer to one is taken for that
        assert "rtype keepalive@" in server.log.read_text()


def test_a_secret_on_stdin_is_in_no_argument_and_no_error(connection: SshConnection) -> None:
    canary = "canary-7c1f93ab"
    process = connection.start(["sh", "-c", "read -r secret; sleep 5"])
    process.write(f"{canary}\n".encode())
    assert not any(canary in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
    for work in (
        lambda: process.wait(0.2),
        lambda: connection.run(["sleep", "5"], stdin=canary.encode(), timeout_s=0.2),
    ):
        with pytest.raises(SshError) as caught:
            work()
        assert canary not in repr(caught.value)
    process.close()
