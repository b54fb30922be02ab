"""Ranks as threads of one process, whose messages are copied in memory: autograd runs on each as on a real rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from engine.attention.transport import Meter, P2POp, Transport
from engine.planning.topology import Topology


class ThreadTransport(Transport):
    """One rank's end of messages between threads; a send is copied when it is posted."""

    def __init__(self, mailbox: dict[int, Queue[Any]], lock: threading.Lock, topology: Topology, rank: int) -> None:
        super().__init__(Meter(topology, rank))
        self._mailbox, self._lock = mailbox, lock
        self._receiving: dict[int, P2POp] = {}

    def _queue(self, tag: int) -> Queue[Any]:
        with self._lock:
            return self._mailbox.setdefault(tag, Queue())

    def post(self, ops: Sequence[P2POp]) -> None:
        for op in ops:
            self.meter.count(op)
            if op.op == "send":
                self._queue(op.tag).put([tensor.detach().clone() for tensor in op.tensors])
            else:
                self._receiving[op.tag] = op

    def wait(self, messages: Sequence[int]) -> None:
        for tag in messages:
            if tag in self._receiving:
                sent = self._queue(tag).get(timeout=20)
                for target, source in zip(self._receiving.pop(tag).tensors, sent, strict=True):
                    assert target.shape == source.shape, (tag, target.shape, source.shape)
                    target.copy_(source)


def run_on_threads(size: int, function: Callable[[int, Transport], Any]) -> list[Any]:
    """`function(rank, transport)` on `size` ranks at once; their results in order of rank."""
    mailbox: dict[int, Queue[Any]] = {}
    lock = threading.Lock()
    with ThreadPoolExecutor(size) as pool:
        transports = [ThreadTransport(mailbox, lock, Topology(1, size), rank) for rank in range(size)]
        return [future.result() for future in [pool.submit(function, *item) for item in enumerate(transports)]]
