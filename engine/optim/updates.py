"""When weights are updated: all after backward, or each inside it, as soon as its gradient is complete.

    after backward   all gradients live at once (4 bytes per parameter of this rank's shards), so they can be clipped;
                     on the host beside the next forward pass, which waits for the weights of a unit when it comes there
    in backward      those of one FSDP unit do; each is used and freed before the next unit's are reduced

On the device an update in backward runs from a hook that FSDP2 calls once a shard's gradient is reduced (pytorch pull
request 129450); on the host beside backward (below). By then the unit's backward has read its
weights for the last time, and a weight of two modules (tied embeddings) has the gradients of both: FSDP2 reduces such a
unit at the end of backward.

Weights, gradients and moments on the host: the host adds up and updates while the device computes.

    compute stream   backward of n   backward of n-1        backward of n-2  ...      forward of 0   forward of 1 ...
    reduce stream                 '-> sum n, copy n to pinned memory |C|  sum n-1, copy n-1 ...
    backward's thread                 gives n to the worker ---'
    worker                                    |wait C| adds n up, or updates the weights of n ...  updates 0, 1, 2 ...

FSDP2 copies a unit's reduced gradient to pinned memory without making anybody wait only where no hook hangs on it
(since torch 2.13; before, it called a hook while the copy was under way) and nothing is there to add it to. So no hook
hangs on a gradient: it is taken away when FSDP2 reduces the next unit's, which its all-reduce hook tells, and what the
worker has to wait for is an event on the stream of the copies. `UNITS_AHEAD` bounds the memory of gradients that wait:
where the host is slower than the device, backward waits for it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.config.settings import RunConfig
from engine.distributed.mesh import Mesh
from engine.optim.adamw import clip_gradients, global_norm, square_sum
from engine.parallel.fsdp import fsdp_modules, own_parameters

UNITS_AHEAD = 2  # whose gradients wait, beside those that are used and those on their way

Staged = list[tuple[Tensor, Tensor]]  # parameters with their gradients
Submit = Callable[[Callable[[], None]], "Future[None]"]  # runs calls in their order


class Arrival(Protocol):
    """Something that a thread can wait for: a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Returns when it has come."""


class Updates:
    """Brings gradients into the weights: clips all by their global norm after backward, then updates all weights.

    `optimizer` owns the parameters of the sharded `model`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self._model, self._optimizer, self._max_grad_norm = model, optimizer, max_grad_norm

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Ends a step after backward; the parameters have no gradient any more. All ranks must call.

        Gives the global 2-norm of the gradients before clipping: fp32 scalar where the gradients lie, equal on all
        ranks. `taken` may refuse the update when it has seen that norm; where weights are updated in backward there is
        none. Raises what went wrong beside backward.
        """
        norm = clip_gradients(self._model.parameters(), self._max_grad_norm)
        if taken is None or taken(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def wait_pending(self) -> None:
        """Returns when all weights are updated: forward passes wait by themselves. Raises what went wrong."""


def build_updates(config: RunConfig, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> Updates:
    """The updates that the configuration wants."""
    in_backward, owner = config.memory.optimizer_in_backward, (model, optimizer, config.optimizer.max_grad_norm)
    if config.memory.optimizer_store == "host":
        if mesh.device.type != "cuda":  # whose copies are there, and whose cores compute
            return HostUpdates(*owner, at_once, lambda: None, in_backward=in_backward)
        return HostUpdates(*owner, worker_thread(), blocking_event, in_backward=in_backward)
    return UpdatesInBackward(*owner) if in_backward else Updates(*owner)


class UpdatesInBackward(Updates):
    """Updates every weight from a hook on its gradient; only the sum of the gradients' squares outlives them.

    One optimizer owns all weights, as it does after backward, so its state is the same either way. A step of it from a
    hook finds one gradient and passes over the other weights, some 0.1 us each.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(model, optimizer, max_grad_norm)
        self._squares: dict[int, Tensor] = {}  # of this step's gradients, float64 scalars, by id of the parameter
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`; by now all weights are updated."""
        assert taken is None
        squares, self._squares = self._squares, {}
        return _norm_of(squares.values())

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """Runs on the stream that reduced the gradient."""
        assert parameter.grad is not None
        assert id(parameter) not in self._squares, "a weight was updated with a part of its gradient"
        self._squares[id(parameter)] = square_sum([parameter.grad])
        self._optimizer.step()
        parameter.grad = None


class HostUpdates(Updates):
    """Adds gradients up on the host beside backward, and updates weights beside the next forward pass (see above).

    in_backward   updates them instead of adding up, as soon as their gradients are there
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        submit: Submit,
        arrival: Callable[[], Arrival | None],
        *,
        in_backward: bool,
    ) -> None:
        super().__init__(model, optimizer, max_grad_norm)
        self._submit, self._in_backward = submit, in_backward
        self._squares: dict[Tensor, Tensor] = {}  # of a parameter's gradient in this step, float64 scalars
        self._sums: dict[Tensor, Tensor] = {}  # by parameter, over the micro-steps so far
        self._running: dict[Tensor, Future[None]] = {}  # the update of a parameter that nobody has waited for
        self._gradients = HostGradients(model, self._update if in_backward else self._add, submit, arrival)
        # In the order in which forward wants them: the root's own are gathered first.
        self._units: list[list[nn.Parameter]] = []
        for unit in fsdp_modules(model):
            assert isinstance(unit, nn.Module)
            self._units.append(own := own_parameters(unit))
            unit.register_forward_pre_hook(partial(self._before_forward, own), prepend=True)  # before it is gathered

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`."""
        self._gradients.finish()
        norm = _norm_of(self._squares.values())
        self._squares.clear()
        if self._in_backward:
            assert taken is None
        elif taken is None or taken(norm):
            self._update_beside_forward(norm)
        self._sums.clear()
        return norm

    def wait_pending(self) -> None:
        """See `Updates`."""
        self._wait_for(list(self._running))

    def _add(self, staged: Staged) -> None:
        for parameter, gradient in staged:
            if parameter in self._sums:
                self._sums[parameter] += gradient
            else:
                self._sums[parameter] = gradient
            self._squares[parameter] = square_sum([self._sums[parameter]])

    def _update(self, staged: Staged) -> None:
        for parameter, gradient in staged:
            self._squares[parameter] = square_sum([gradient])
        self._step(staged, self._optimizer.param_groups)

    def _update_beside_forward(self, norm: Tensor) -> None:
        """With the learning rate of now, which may be set anew meanwhile."""
        groups = [
            group | {"lr": group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]}
            for group in self._optimizer.param_groups
        ]
        for own in self._units:
            staged: Staged = [(parameter, self._sums.pop(parameter)) for parameter in own if parameter in self._sums]
            if staged:
                done = self._submit(partial(self._step, staged, groups, norm))
                self._running |= dict.fromkeys((parameter for parameter, _ in staged), done)

    @torch.no_grad()
    def _step(self, staged: Staged, groups: list[dict[str, Any]], norm: Tensor | None = None) -> None:
        """Clips where there is a norm, and updates. The optimizer sees these parameters alone: others may have
        gradients that have not arrived.
        """
        for parameter, gradient in staged:
            parameter.grad = gradient
        chosen = dict(staged)
        if norm is not None and self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(chosen), self._max_grad_norm, norm, foreach=True)
        own = [group | {"params": [member for member in group["params"] if member in chosen]} for group in groups]
        optimizer = object.__new__(
            type(self._optimizer)
        )  # with the same state; copy.copy leaves out what subclasses have
        optimizer.__dict__ = vars(self._optimizer) | {"param_groups": own}
        optimizer.step()
        for parameter in chosen:
            parameter.grad = None

    def _before_forward(self, own: Sequence[Tensor], *_: object) -> None:
        self._wait_for(own)

    def _wait_for(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if (done := self._running.pop(parameter, None)) is not None:
                done.result()


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


def _norm_of(squares: Iterable[Tensor]) -> Tensor:
    """The `global_norm` of gradients that gave these `square_sum`s one after the other."""
    found = list(squares)
    assert found, "no gradient came"
    return global_norm(torch.stack(found).sum())
