"""TCP connections: every address of a name is tried, within one deadline, and the most telling failure is told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from testkit.machine_clock import machine_time

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.pool import NameService, open_socket


def names(*addresses: str) -> NameService:
    """A name service that knows one name."""

    def ask(host: str, port: int) -> list[tuple[Any, ...]]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (family, socket.SOCK_STREAM, 0, "", (address, port))
            for family, address in zip(families, addresses, strict=True)
        ]

    return ask


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a listener on 127.0.0.1 alone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


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


@pytest.mark.parametrize("first", ["127.0.0.2", "::1", "255.255.255.255"])
def test_the_next_address_is_tried_when_one_fails(port: int, first: str) -> None:
    host = Host("node1", "node1.example", port)
    with open_socket(host, Deadline.after(5), names(first, "127.0.0.1")) as sock:
        assert sock.getpeername() == ("127.0.0.1", port)


def test_an_address_that_hangs_leaves_time_for_the_next() -> None:
    with full_listener() as port, socket.create_server(("127.0.0.2", port)):
        host, deadline = Host("node1", "node1.example", port), Deadline.after(4)
        with open_socket(host, deadline, names("127.0.0.1", "127.0.0.2")) as sock:
            assert deadline.left_s
            assert sock.getpeername()[0] == "127.0.0.2"


def test_when_all_fail_the_most_telling_failure_is_told(port: int) -> None:
    with pytest.raises(SshError) as caught:
        open_socket(Host("node1", "node1.example", port), Deadline.after(5), names("255.255.255.255", "127.0.0.2"))
    assert caught.value.kind is SshFailure.REFUSED
    assert "127.0.0.2" in str(caught.value)


def test_an_address_that_hangs_ends_with_the_deadline() -> None:
    with full_listener() as port:
        begin = machine_time()
        with pytest.raises(SshError) as caught:
            open_socket(Host("node1", "127.0.0.1", port), Deadline.after(0.3))
        assert caught.value.kind is SshFailure.TIMEOUT
        assert machine_time() - begin < 1.5


def test_a_name_service_that_hangs_ends_with_the_deadline() -> None:
    never = threading.Event()

    def ask(host: str, port: int) -> list[tuple[Any, ...]]:
        never.wait(200)
        return []

    begin = machine_time()
    with pytest.raises(SshError, match="no name server") as caught:
        open_socket(Host("node1", "node1.example"), Deadline.after(0.3), ask)
    never.set()
    assert caught.value.kind is SshFailure.DNS
    assert machine_time() - begin < 1.5
