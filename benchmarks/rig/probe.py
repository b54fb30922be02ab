"""Raw TCP throughput: `receive ADDRESS PORT` prints Mbit/s, `send ADDRESS PORT SECONDS` feeds it."""

from __future__ import annotations

import socket
import sys
import time

_CHUNK = 1 << 20


def receive(address: str, port: int) -> None:
    """Accept one connection and print the rate at which its bytes came, in Mbit/s."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            buffer = bytearray(_CHUNK)
            connection.recv_into(buffer)
            start, counted = time.perf_counter(), 0
            while count := connection.recv_into(buffer):
                counted += count
            elapsed = time.perf_counter() - start
        print(8 * counted / elapsed / 1e6, flush=True)


def send(address: str, port: int, seconds: float) -> None:
    """Send as fast as the link takes it."""
    data = bytes(_CHUNK)
    with socket.create_connection((address, port), timeout=10) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
