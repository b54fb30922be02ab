"""Starting a run on all of its nodes at once: all begin, or none is left running."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence

from cluster.control.link import NodeLink, NodeSpec, StartRefusedError
from cluster.failure import Failure
from engine.config.errors import BurstError

WIDTH = 64
_SHOWN = 8


class Starter:
    """Starts `specs` on `links` in at most `width` threads; `poll` says who has begun, `refusals` who has not.

    asked: nodes that were asked to begin, whatever they answered, or will.
    """

    def __init__(self, links: Sequence[NodeLink], specs: Sequence[NodeSpec], width: int = WIDTH) -> None:
        self.refusals: dict[str, BaseException] = {}
        self.asked: set[str] = set()
        self._waiting: queue.SimpleQueue[tuple[NodeLink, NodeSpec]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        for link, spec in zip(links, specs, strict=True):
            self._waiting.put((link, spec))
        self._lock, self._is_halted = threading.Lock(), False  # one who halts knows whom nobody will ask any more
        self._threads = [
            threading.Thread(target=self._serve, name=f"start {number}", daemon=True)
            for number in range(min(width, len(links)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing more begins; `poll` once more after it."""
        return not any(thread.is_alive() for thread in self._threads)

    def poll(self) -> list[str]:
        """Nodes that have begun since the last call. One that refuses halts the rest. Raises what is a bug."""
        begun = []
        while not self._done.empty():
            name, error = self._done.get()
            if error is None:
                begun.append(name)
            elif isinstance(error, BurstError):
                self.refusals[name] = error
                self.halt()
            else:
                raise error
        return begun

    def halt(self) -> None:
        """Start nothing more; what is just being started is not broken off. From now on `asked` does not grow."""
        with self._lock:
            self._is_halted = True

    def _serve(self) -> None:
        while (next_one := self._next()) is not None:
            link, spec = next_one
            try:
                link.start(spec)
            except BaseException as error:
                self._done.put((link.node, error))
            else:
                self._done.put((link.node, None))

    def _next(self) -> tuple[NodeLink, NodeSpec] | None:
        """Whom to ask now; None when nothing more is to begin."""
        with self._lock:
            if self._is_halted or self._waiting.empty():
                return None
            link, spec = self._waiting.get_nowait()
            self.asked.add(link.node)
            return link, spec


def start_failure(refusals: Mapping[str, BaseException]) -> Failure:
    """Why a run did not begin, from the nodes that refused; the first by name is named, the others are listed."""
    (first, error), *others = sorted(refusals.items())
    kind = error.kind if isinstance(error, StartRefusedError) else type(error).__name__
    details = tuple(str(other) for _, other in others[:_SHOWN])
    if len(others) > _SHOWN:
        details = (*details, f"and {len(others) - _SHOWN} more")
    return Failure("start", kind, str(error), host=first, details=details)
