"""Runs on a node while nodes are tested against each other, and answers two questions, the second when all listen:

listen {address, token}                 error, or port, where whoever connects is sent the token (hexadecimal): by it
                                        the other side knows that it reached a node of the same test
greet {targets [[name, address, port], ...], timeout_s, width}      results [[name, "ok" | kind, detail, ms], ...]
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.agent.messages import Message, serve

_SILENCE_S = 900.0  # the slowest test of many nodes
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNRESET: "reset",
    errno.ETIMEDOUT: "timeout",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class Greeter:
    """Answers the questions of one test."""

    def answer(self, asked: Message, data: bytes = b"") -> tuple[Message, bytes]:
        """The answer, once it is known."""
        if "listen" not in asked:
            return {"results": self._greet_all(**asked["greet"])}, b""
        self._address, self._token = asked["listen"]["address"], bytes.fromhex(asked["listen"]["token"])
        try:
            listener = _bind(self._address)
            listener.listen(1024)
        except OSError as error:
            return {"error": error.strerror or str(error)}, b""
        threading.Thread(target=self._tell, args=(listener,), daemon=True).start()
        return {"port": listener.getsockname()[1]}, b""

    def _tell(self, listener: socket.socket) -> None:
        """Give the token to everybody, for ever; who does not take it holds nobody up."""
        while True:
            # Out of file descriptors: they come back. A peer that is gone already: the next one.
            with contextlib.suppress(OSError), listener.accept()[0] as peer:
                peer.setblocking(False)
                peer.sendall(self._token)

    def _greet_all(self, targets: list[tuple[str, str, int]], timeout_s: float, width: int) -> list[Any]:
        def measure(target: tuple[str, str, int]) -> list[Any]:
            begin = time.monotonic()
            found = self._greet((target[1], target[2]), timeout_s)
            return [target[0], *found, 1000 * (time.monotonic() - begin)]

        with ThreadPoolExecutor(width) as pool:
            return list(pool.map(measure, targets))

    def _greet(self, target: tuple[str, int], timeout_s: float) -> tuple[str, str]:
        """(ok or kind, detail) of one connection."""
        try:
            # From the chosen address: the kernel might otherwise leave by another interface, and that would be tested.
            with _bind(self._address) as peer:
                peer.settimeout(timeout_s)
                peer.connect(target)
                with peer.makefile("rb") as stream:
                    said = stream.read(len(self._token))
        except socket.timeout:
            return "timeout", "no answer"
        except OSError as error:
            return _KINDS.get(error.errno or 0, "error"), error.strerror or str(error)
        return ("ok", "") if said == self._token else ("stranger", "something else answers on that port")


def _bind(address: str) -> socket.socket:
    """A socket at a free port of `address`, IPv4 or IPv6."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    return listener


def main() -> None:
    """Until the other side is gone."""
    serve(Greeter().answer, _SILENCE_S)
