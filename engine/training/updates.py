"""When weights are updated: all after backward, or each inside it, as soon as its gradient is complete.

    after backward   all gradients live at once (4 bytes per parameter of this rank's shards), so they can be clipped
    in backward      those of one FSDP unit do; each is used and freed before the next unit's are reduced

On the device an update in backward runs from a hook that FSDP2 calls once a shard's gradient is reduced (pytorch pull
request 129450); on the host beside backward (below). By then the unit's backward has read its
weights for the last time, and a weight of two modules (tied embeddings) has the gradients of both: FSDP2 reduces such a
unit at the end of backward.

Weights, gradients and moments on the host: the host adds up and updates while the device is in its backward pass.

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

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.config.settings import RunConfig
from engine.parallel.fsdp import fsdp_modules
from engine.parallel.mesh import Mesh
from engine.training.optim import clip_gradients, global_norm, square_sum

UNITS_AHEAD = 2  # whose gradients wait, beside those that are used and those on their way

Staged = list[tuple[Tensor, Tensor]]  # parameters with their gradients
Submit = Callable[[Callable[[], None]], "Future[None]"]  # runs calls in their order


class Arrival(Protocol):
    """Something that a thread can wait for: a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Returns when it has come."""


class Updates(Protocol):
    """Brings gradients into the weights."""

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Ends a step after backward; no gradient is left. All ranks must call.

        Gives the global 2-norm of the gradients before clipping: fp32 scalar where the gradients lie, equal on all
        ranks. `taken` may refuse the update when it has seen that norm.
        """
        ...


def build_updates(config: RunConfig, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> Updates:
    """The updates that the configuration wants; `optimizer` must own the parameters of the sharded `model`."""
    in_backward, max_grad_norm = config.memory.optimizer_in_backward, config.optimizer.max_grad_norm
    after = UpdateAfterBackward(model, optimizer, max_grad_norm)
    if config.memory.optimizer_store == "host":
        if mesh.device.type != "cuda":  # whose copies are there, and whose cores compute
            return HostUpdates(after, at_once, lambda: None, in_backward=in_backward)
        return HostUpdates(after, worker_thread(), blocking_event, in_backward=in_backward)
    return UpdateInBackward(model, optimizer) if in_backward else after


@dataclass(frozen=True)
class UpdateAfterBackward:
    """Clips all gradients by their global norm, then updates all weights."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`."""
        norm = clip_gradients(self.model.parameters(), self.max_grad_norm)
        if taken is None or taken(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


class UpdateInBackward:
    """Updates every weight from a hook on its gradient; only the sum of the gradients' squares outlives them.

    One optimizer owns all weights, as it does after backward, so its state is the same either way. A step of it from a
    hook finds one gradient and passes over the other weights, some 0.1 us each.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._updated: set[int] = set()  # ids of the parameters of this step
        self._squares: list[Tensor] = []  # of the gradients of this step, each a float64 scalar where it lies
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`; by now all weights are updated."""
        assert taken is None
        self._updated.clear()
        return _norm_of(self._squares)

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """Runs on the stream that reduced the gradient."""
        assert parameter.grad is not None
        assert id(parameter) not in self._updated, "a weight was updated with a part of its gradient"
        self._updated.add(id(parameter))
        self._squares.append(square_sum([parameter.grad]))
        self._optimizer.step()
        parameter.grad = None


class HostUpdates:
    """Adds gradients up on the host, or updates weights there, beside backward (see above)."""

    def __init__(
        self,
        after: UpdateAfterBackward,
        submit: Submit,
        arrival: Callable[[], Arrival | None],
        *,
        in_backward: bool,
    ) -> None:
        self._after = after
        self._in_backward = in_backward
        self._squares: list[Tensor] = []  # of the gradients of this step, each a float64 scalar where it lies
        self._sums: dict[Tensor, Tensor] = {}  # by parameter, over the micro-steps so far
        self._gradients = HostGradients(after.model, self._update if in_backward else self._add, submit, arrival)

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`. Raises what went wrong beside backward."""
        self._gradients.finish()
        if self._in_backward:
            assert taken is None
            return _norm_of(self._squares)
        for parameter, gradient in self._sums.items():
            parameter.grad = gradient
        self._sums.clear()
        return self._after.finish(taken)

    def _add(self, staged: Staged) -> None:
        for parameter, gradient in staged:
            if parameter in self._sums:
                self._sums[parameter] += gradient
            else:
                self._sums[parameter] = gradient

    def _update(self, staged: Staged) -> None:
        """The optimizer sees these parameters alone: others may have gradients that have not arrived."""
        for parameter, gradient in staged:
            self._squares.append(square_sum([gradient]))
            parameter.grad = gradient
        optimizer, chosen = self._after.optimizer, {parameter for parameter, _ in staged}
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": [member for member in group["params"] if member in chosen]} for group in groups
        ]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        for parameter, _ in staged:
            parameter.grad = None


class HostGradients:
    """Takes gradients from the parameters of a sharded model as they come; `finish` when backward is over.

    use       called by `submit` with the gradients of some parameters, in the order in which backward gave them; never
              again once it has failed
    arrival   of all copies that were started on the current stream so far; None: they are there
    """

    def __init__(
        self,
        model: nn.Module,
        use: Callable[[Staged], None],
        submit: Submit,
        arrival: Callable[[], Arrival | None],
    ) -> None:
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._use, self._submit, self._arrival = use, submit, arrival
        self._failure: BaseException | None = None
        self._pending: deque[tuple[Future[None], set[Tensor]]] = deque()
        for unit in fsdp_modules(model):
            unit.set_all_reduce_hook(self._before_unit)

    def finish(self) -> None:
        """After backward: everything was used when it returns. Raises what `use` raised."""
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
        done = self._submit(partial(self._wait_and_use, self._arrival(), staged))
        self._pending.append((done, {gradient for _, gradient in staged}))

    def _wait(self, most: int) -> None:
        """Until at most so many units are not used."""
        while self._pending and (len(self._pending) > most or self._pending[0][0].done()):
            self._pending.popleft()[0].result()

    @torch.no_grad()
    def _wait_and_use(self, arrival: Arrival | None, staged: Staged) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            if arrival is not None:
                arrival.synchronize()
            self._use(staged)
        except BaseException as error:
            self._failure = error
            raise


def worker_thread() -> Submit:
    """Runs calls one after the other in a thread, which ends when nobody holds this any longer."""
    return ThreadPoolExecutor(1, thread_name_prefix="host updates").submit


def at_once(call: Callable[[], None]) -> Future[None]:
    """Runs a call where it is."""
    call()
    done: Future[None] = Future()
    done.set_result(None)
    return done


def blocking_event() -> Arrival:
    """The point that the current CUDA stream has been given work up to; a thread that waits for it takes no core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _norm_of(squares: list[Tensor]) -> Tensor:
    """The `global_norm` of gradients that gave these one after the other and need not outlive that; begins anew."""
    assert squares, "no gradient came"
    norm = global_norm(torch.stack(squares).sum())
    squares.clear()
    return norm
