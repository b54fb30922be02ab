"""Weights, gradients and moments on the host: the host adds up and updates while the device is in its backward pass.

    compute stream   backward of n   backward of n-1        backward of n-2  ...
    reduce stream                 '-> sum n, copy n to pinned memory |C|  sum n-1, copy n-1 ...
    backward's thread                 gives n to the worker ---'
    worker                                    |wait C| adds n up, or updates the weights of n ...

FSDP2 copies a unit's reduced gradient to pinned memory without making anybody wait only where no hook hangs on it
(since torch 2.13; before, it called a hook while the copy was under way) and nothing is there to add it to. So no hook
hangs on a gradient: it is taken away when FSDP2 reduces the next unit's, which its all-reduce hook tells, and what the
worker has to wait for is an event on the stream of the copies. `UNITS_AHEAD` bounds the memory of gradients that wait:
where the host is slower than the device, backward waits for it there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.parallel.fsdp import fsdp_modules

UNITS_AHEAD = 2  # whose gradients wait, beside those that are used and those on their way

Staged = list[tuple[Tensor, Tensor]]  # parameters with their gradients
_Call = tuple[Callable[[], None], "Future[None]"]


class Arrival(Protocol):
    """Something that a thread can wait for: a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Returns when it has come."""


class Worker(Protocol):
    """Runs calls in their order."""

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Done when the call has returned; raises what it, or one before it, raised."""


class Inline:
    """A Worker that runs a call at once: for a CPU, whose copies are there and whose cores compute."""

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """See Worker."""
        call()
        done: Future[None] = Future()
        done.set_result(None)
        return done


class WorkerThread:
    """A Worker with one thread of its own, which ends when nobody holds this object. After a failure nothing runs."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name="host updates", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """See Worker."""
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done


def _work(calls: SimpleQueue[_Call | None]) -> None:
    failure: BaseException | None = None
    while (entry := calls.get()) is not None:
        failure = failure or _failure_of(entry[0])
        if failure is None:
            entry[1].set_result(None)
        else:
            entry[1].set_exception(failure)
        del entry  # and the gradients with it, before the next call comes


def _failure_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


class HostGradients:
    """Takes gradients from the parameters of a sharded model as they come; `finish` when backward is over.

    use       called by `worker` with the gradients of some parameters, in the order in which backward gave them
    arrival   of all copies that were started on the current stream so far; None: they are there
    """

    def __init__(
        self,
        model: nn.Module,
        use: Callable[[Staged], None],
        worker: Worker,
        arrival: Callable[[], Arrival | None],
    ) -> None:
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._use, self._worker, self._arrival = use, worker, arrival
        self._pending: deque[tuple[Future[None], set[Tensor]]] = deque()
        for unit in fsdp_modules(model):
            unit.set_all_reduce_hook(self._before_unit)

    def finish(self) -> None:
        """After backward: everything was used when it returns. Raises what the worker raised."""
        self._take()
        self._wait(0)

    def _before_unit(self, reduced: Tensor) -> None:
        """FSDP2 calls it between the sum of a unit's gradients and their copy; those of the units before are there."""
        if reduced.device.type == "cuda":
            # With this hook the copy runs on another stream than `reduced` was allocated on, which FSDP2 does not note.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._take()

    def _take(self) -> None:
        self._wait(UNITS_AHEAD)
        # `use` may set the gradient that it was given; that is not taken a second time.
        given = {gradient for _, gradients in self._pending for gradient in gradients}
        found = [(parameter, parameter.grad) for parameter in self._parameters]
        staged = [(parameter, grad) for parameter, grad in found if grad is not None and grad not in given]
        if not staged:
            return
        for parameter, _ in staged:
            parameter.grad = None
        done = self._worker.submit(partial(self._wait_and_use, self._arrival(), staged))
        self._pending.append((done, {gradient for _, gradient in staged}))

    def _wait(self, most: int) -> None:
        """Until at most so many units are not used."""
        while self._pending and (len(self._pending) > most or self._pending[0][0].done()):
            self._pending.popleft()[0].result()

    @torch.no_grad()
    def _wait_and_use(self, arrival: Arrival | None, staged: Staged) -> None:
        if arrival is not None:
            arrival.synchronize()
        self._use(staged)


def blocking_event() -> Arrival:
    """The point that the current CUDA stream has been given work up to; a thread that waits for it takes no core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def nothing_to_wait_for() -> None:
    """The arrival of copies on a CPU."""
