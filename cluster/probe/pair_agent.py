"""Runs on a node while nodes are tested against each other; sent over stdin, never written to disk there.

Standard library of Python 3.9 and newer. Input: one JSON object per line; the first is the greeting

    {"nonce": WORD, "token": HEX, "address": "10.0.0.1", "deadline_s": 60}

answered by {"port": N} or {"error": text}. Then requests, each with an `id`, answered in any order:

    {"id": 1, "targets": [[name, address, port], ...], "timeout_s": 3, "width": 64}
        -> {"id": 1, "results": [[name, "ok" | kind, detail, milliseconds], ...]}

Every line of output begins with the nonce, for a login shell may print what it likes. The agent ends when its input
ends (the asking side died) and at its deadline, whatever it is doing. Only who knows the token gets an answer on its
port: both sides prove it by a digest over random challenges.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

GREETING = b"burst-pair-1\n"
CHALLENGE_BYTES = 16
DIGEST_BYTES = 32
MAX_PEERS = 1024
KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ECONNRESET: "reset",
    errno.ETIMEDOUT: "timeout",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class StrangerError(Exception):
    """Whoever answers is no agent of the same test."""


def proof(token: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    """The digest that only holders of the token can make, for one connection and one side of it."""
    return hmac.new(token, b"|".join((role, ours, theirs)), hashlib.sha256).digest()


def receive(peer: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes; StrangerError when the peer ends before."""
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise StrangerError("the connection ended in the greeting")
        data += more
    return data


def failure(error: BaseException) -> list[str]:
    """(kind, detail) of what went wrong with a connection."""
    if isinstance(error, StrangerError):
        return ["stranger", str(error)]
    if isinstance(error, (socket.timeout, TimeoutError)):
        return ["timeout", "no answer"]
    if isinstance(error, OSError):
        return [KINDS.get(error.errno or 0, "error"), os.strerror(error.errno) if error.errno else str(error)]
    return ["error", type(error).__name__]


def family_of(address: str) -> int:
    """AF_INET6 for addresses with a colon."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def call(token: bytes, source: str, target: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connection from address `source` to the agent at `target`, both sides proven."""
    peer = socket.socket(family_of(target[0]), socket.SOCK_STREAM)
    try:
        peer.settimeout(timeout_s)
        # From the chosen address: the kernel might otherwise leave by another interface, and that would be measured.
        peer.bind((source, 0))
        peer.connect(target)
        ours = os.urandom(CHALLENGE_BYTES)
        peer.sendall(GREETING + ours)
        if receive(peer, len(GREETING)) != GREETING:
            raise StrangerError("something else answers on that port")
        theirs = receive(peer, CHALLENGE_BYTES)
        if not hmac.compare_digest(receive(peer, DIGEST_BYTES), proof(token, b"server", ours, theirs)):
            raise StrangerError("another test answers on that port")
        peer.sendall(proof(token, b"client", ours, theirs))
        return peer
    except BaseException:
        peer.close()
        raise


def answer(token: bytes, peer: socket.socket, timeout_s: float) -> None:
    """Serve one connection: prove, be proven, then say OK."""
    with peer:
        peer.settimeout(timeout_s)
        if receive(peer, len(GREETING)) != GREETING:
            return
        theirs, ours = receive(peer, CHALLENGE_BYTES), os.urandom(CHALLENGE_BYTES)
        peer.sendall(GREETING + ours + proof(token, b"server", theirs, ours))
        if hmac.compare_digest(receive(peer, DIGEST_BYTES), proof(token, b"client", theirs, ours)):
            peer.sendall(b"+")


class Agent:
    """The listening socket of this node, and what is asked of it."""

    def __init__(self, greeting: dict[str, Any]) -> None:
        self.nonce = str(greeting["nonce"])
        self.token = bytes.fromhex(str(greeting["token"]))
        self.address = str(greeting["address"])
        self.lock = threading.Lock()
        self.peers = threading.Semaphore(MAX_PEERS)
        self.listener = socket.socket(family_of(self.address), socket.SOCK_STREAM)

    def say(self, reply: dict[str, Any]) -> None:
        """One line of output, whole."""
        with self.lock:
            sys.stdout.write(f"{self.nonce} {json.dumps(reply)}\n")
            sys.stdout.flush()

    def listen(self) -> bool:
        """Take a free port on the address and serve it; False, and said so, when the address is not of this node."""
        try:
            self.listener.bind((self.address, 0))
            self.listener.listen(1024)
        except OSError as error:
            self.say({"error": failure(error)[1]})
            return False
        start(self.serve)
        self.say({"port": self.listener.getsockname()[1]})
        return True

    def serve(self) -> None:
        """Accept for ever."""
        while True:
            self.peers.acquire()
            try:
                peer = self.listener.accept()[0]
            except OSError:
                self.peers.release()
                time.sleep(0.05)  # out of file descriptors: they come back
                continue
            start(self.serve_one, peer)

    def serve_one(self, peer: socket.socket) -> None:
        """One peer; whatever it does wrong ends only its own connection."""
        try:
            with contextlib.suppress(OSError, StrangerError):
                answer(self.token, peer, 5.0)
        finally:
            self.peers.release()

    def handle(self, request: dict[str, Any]) -> None:
        """Answer one request."""
        reply: dict[str, Any]
        try:
            reply = self.connect(request)
        except Exception as error:
            kind, detail = failure(error)
            reply = {"error": kind, "detail": detail}
        reply["id"] = request.get("id")
        self.say(reply)

    def connect(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say hello to every target, so many at a time."""
        todo: queue.Queue[Any] = queue.Queue()
        for target in request["targets"]:
            todo.put(target)
        results: list[Any] = []
        timeout_s = float(request["timeout_s"])

        def work() -> None:
            while True:
                try:
                    name, address, port = todo.get_nowait()
                except queue.Empty:
                    return
                results.append([name, *self.ping((str(address), int(port)), timeout_s)])

        width = max(1, min(int(request["width"]), todo.qsize()))
        for thread in [start(work) for _ in range(width)]:
            thread.join()
        return {"results": results}

    def ping(self, target: tuple[str, int], timeout_s: float) -> list[Any]:
        """(ok or kind, detail, milliseconds) of one connection and its greeting."""
        begin = time.monotonic()
        try:
            with call(self.token, self.address, target, timeout_s) as peer:
                receive(peer, 1)
        except (OSError, StrangerError) as error:
            return [*failure(error), 1000 * (time.monotonic() - begin)]
        return ["ok", "", 1000 * (time.monotonic() - begin)]


def start(work: Any, *arguments: Any) -> threading.Thread:
    """A thread that does not keep the process alive."""
    thread = threading.Thread(target=work, args=arguments)
    thread.daemon = True
    thread.start()
    return thread


def end_at(deadline: float) -> None:
    """End the process at `deadline`, whatever it is doing."""
    time.sleep(max(0.0, deadline - time.monotonic()))
    os._exit(3)


def main() -> None:
    """Greeting, then requests until the input ends."""
    # A thread takes 8 MiB of address space otherwise, and hundreds may run.
    threading.stack_size(512 << 10)
    greeting = json.loads(sys.stdin.buffer.readline().decode())
    start(end_at, time.monotonic() + float(greeting["deadline_s"]))
    agent = Agent(greeting)
    if agent.listen():
        for line in iter(sys.stdin.buffer.readline, b""):
            start(agent.handle, json.loads(line.decode()))
    sys.stdout.flush()
    # Not sys.exit: threads in the middle of a greeting must not keep the node busy.
    os._exit(0)


if __name__ == "__main__":
    main()
