"""The same work on many hosts at once: one result per host, bounded width; only the end waits for the slowest."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.ssh.hosts import Host
from engine.config.errors import BurstError

T = TypeVar("T")
DEFAULT_WIDTH = 64


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one host: `value`, or the error that says why there is none."""

    host: Host
    value: T | None
    error: BurstError | None
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """Whether the work was done."""
        return self.error is None


def fan_out(
    hosts: Sequence[Host],
    work: Callable[[Host], T],
    *,
    width: int = DEFAULT_WIDTH,
    on_outcome: Callable[[Outcome[T]], None] | None = None,
) -> dict[str, Outcome[T]]:
    """The outcome of `work(host)` by host name, in the order of `hosts`; at most `width` run at the same time.

    `on_outcome` is told of every outcome as it comes, in this thread. A BurstError of one host is its outcome; any
    other exception is a bug and is raised. Every `work` must end by its own timeouts: threads cannot be killed. After
    an interrupt nothing more begins, and what runs does not hold the process: its threads are daemons.
    """
    waiting: queue.SimpleQueue[Host] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome[T] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    for host in hosts:
        waiting.put(host)

    def serve() -> None:
        while not stop.is_set():
            try:
                host = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put(_outcome(host, work))
            except BaseException as error:
                done.put(error)

    found: dict[str, Outcome[T]] = {}
    try:
        for number in range(min(max(1, width), len(hosts))):
            threading.Thread(target=serve, name=f"fan-out {number}", daemon=True).start()
        for _ in hosts:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[outcome.host.name] = outcome
            if on_outcome is not None:
                on_outcome(outcome)
    finally:
        stop.set()
    return {host.name: found[host.name] for host in hosts}


def _outcome(host: Host, work: Callable[[Host], T]) -> Outcome[T]:
    begin = time.monotonic()
    try:
        value = work(host)
    except BurstError as error:
        return Outcome(host, None, error, time.monotonic() - begin)
    return Outcome(host, value, None, time.monotonic() - begin)
