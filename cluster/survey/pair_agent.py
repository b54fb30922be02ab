"""Runs on a node while nodes are tested against each other; sent over stdin, never written to disk there.

Standard library of Python 3.9 and newer. Input: two lines, each a JSON object; the first

    {"token": HEX, "address": "10.0.0.1", "deadline_s": 60}

is answered by {"port": N} or {"error": text}, the second, when all agents listen,

    {"targets": [[name, address, port], ...], "timeout_s": 3, "width": 64}

by {"results": [[name, "ok" | kind, detail, milliseconds], ...]}. Every line of output begins with the token, for a
login shell may print what it likes. The agent ends when its input ends (the asking side died) and at its deadline.
Whoever connects to it is sent the token, by which the other side knows that it reached an agent of the same test.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNRESET: "reset",
    errno.ETIMEDOUT: "timeout",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


def listen(address: str) -> socket.socket:
    """A listener at a free port of `address`, IPv4 or IPv6."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    return listener


def serve(listener: socket.socket, token: bytes) -> None:
    """Give the token to everybody, for ever; who does not take it holds nobody up."""
    while True:
        # Out of file descriptors: they come back. A peer that is gone already: the next one.
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            peer.setblocking(False)
            peer.sendall(token)


def greet(source: str, target: "tuple[str, int]", token: bytes, timeout_s: float) -> "tuple[str, str]":
    """(ok or kind, detail) of one connection."""
    try:
        # From the chosen address: the kernel might otherwise leave by another interface, and that would be tested.
        with listen(source) as peer:
            peer.settimeout(timeout_s)
            peer.connect(target)
            said = b""
            while len(said) < len(token):
                more = peer.recv(len(token) - len(said))
                if not more:
                    break
                said += more
    except socket.timeout:
        return "timeout", "no answer"
    except OSError as error:
        return KINDS.get(error.errno or 0, "error"), error.strerror or str(error)
    return ("ok", "") if said == token else ("stranger", "something else answers on that port")


def answer(word: str, address: str) -> None:
    """Listen at `address`, tell the port, connect when asked to."""

    def say(**reply: object) -> None:
        print(word, json.dumps(reply), flush=True)

    token = bytes.fromhex(word)
    try:
        listener = listen(address)
        listener.listen(1024)
    except OSError as error:
        return say(error=error.strerror or str(error))
    threading.Thread(target=serve, args=(listener, token), daemon=True).start()
    say(port=listener.getsockname()[1])

    def connect(request: "dict[str, Any]") -> None:
        def measure(target: "list[Any]") -> "list[Any]":
            begin = time.monotonic()
            found = greet(address, (target[1], target[2]), token, request["timeout_s"])
            return [target[0], *found, 1000 * (time.monotonic() - begin)]

        with ThreadPoolExecutor(request["width"]) as pool:
            say(results=list(pool.map(measure, request["targets"])))

    for line in iter(sys.stdin.buffer.readline, b""):
        threading.Thread(target=connect, args=(json.loads(line.decode()),), daemon=True).start()
    return None


if __name__ == "__main__":
    greeting = json.loads(sys.stdin.buffer.readline().decode())
    signal.alarm(greeting["deadline_s"])  # ends it, whatever it is doing
    answer(greeting["token"], str(greeting["address"]))
    # Not sys.exit: threads in the middle of a greeting must not keep the node busy, nor unread words matter.
    os._exit(0)
