"""Runs on a node while nodes are tested against each other; sent over stdin, never written to disk there.

Standard library of Python 3.9 and newer. Input: two lines, each a JSON object; the first

    {"nonce": WORD, "token": HEX, "address": "10.0.0.1", "deadline_s": 60}

is answered by {"port": N} or {"error": text}, the second, when all agents listen,

    {"targets": [[name, address, port], ...], "timeout_s": 3, "width": 64}

by {"results": [[name, "ok" | kind, detail, milliseconds], ...]}. Every line of output begins with the nonce, for a
login shell may print what it likes. The agent ends when its input ends (the asking side died) and at its deadline,
whatever it is doing. Whoever connects to it is sent the token, by which the other side knows that it reached an agent
of the same test and not whatever else may listen there.
"""

import contextlib
import errno
import json
import os
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


def family_of(address: str) -> int:
    """AF_INET6 for addresses with a colon."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def serve(listener: socket.socket, token: bytes) -> None:
    """Give the token to everybody, for ever; who does not take it holds nobody up."""
    while True:
        # Out of file descriptors: they come back. A peer that is gone already: the next one.
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            peer.setblocking(False)
            peer.sendall(token)


def greet(source: str, target: tuple[str, int], token: bytes, timeout_s: float) -> tuple[str, str]:
    """(ok or kind, detail) of one connection."""
    try:
        with socket.socket(family_of(target[0]), socket.SOCK_STREAM) as peer:
            peer.settimeout(timeout_s)
            # From the chosen address: the kernel might otherwise leave by another interface, and that would be tested.
            peer.bind((source, 0))
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
        return KINDS.get(error.errno or 0, "error"), os.strerror(error.errno) if error.errno else str(error)
    return ("ok", "") if said == token else ("stranger", "something else answers on that port")


def end_at(moment: float) -> None:
    """End the process then, even in the middle of anything."""
    time.sleep(max(0.0, moment - time.monotonic()))
    os._exit(3)


def main() -> None:
    """Listen, connect, wait for the end of the input."""
    lines = iter(sys.stdin.buffer.readline, b"")
    greeting = json.loads(next(lines).decode())
    address, token = str(greeting["address"]), bytes.fromhex(greeting["token"])
    threading.Thread(target=end_at, args=(time.monotonic() + greeting["deadline_s"],), daemon=True).start()

    def say(**reply: object) -> None:
        print(greeting["nonce"], json.dumps(reply), flush=True)

    try:
        listener = socket.socket(family_of(address), socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError as error:
        say(error=os.strerror(error.errno) if error.errno else str(error))
        return
    threading.Thread(target=serve, args=(listener, token), daemon=True).start()
    say(port=listener.getsockname()[1])

    def answer(request: "dict[str, Any]") -> None:
        def connect(target: "list[Any]") -> "list[Any]":
            begin = time.monotonic()
            found = greet(address, (target[1], target[2]), token, request["timeout_s"])
            return [target[0], *found, 1000 * (time.monotonic() - begin)]

        with ThreadPoolExecutor(request["width"]) as pool:
            say(results=list(pool.map(connect, request["targets"])))

    for line in lines:
        threading.Thread(target=answer, args=(json.loads(line.decode()),), daemon=True).start()
    # Not sys.exit: threads in the middle of a greeting must not keep the node busy.
    os._exit(0)


if __name__ == "__main__":
    main()
