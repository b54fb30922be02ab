"""When weights are updated: all after backward, or each within backward as soon as its gradient is reduced.

    after backward   the gradients of all parameters exist together (4 bytes per parameter of this rank's shards), so
                     they can be clipped; with weights on the host the update overlaps the next forward pass, which
                     waits for the weights of a unit before it gathers them
    in backward      the gradients of one FSDP unit exist together; each is used and freed before the next is reduced

On the device an update in backward runs in a post-accumulate-grad hook, which FSDP2 calls once a shard's gradient is
reduced (pytorch/pytorch#129450). By then the unit's backward has read its weights for the last time. A weight shared by
two modules (tied embeddings) has both gradients by then, since FSDP2 reduces such a unit at the end of backward.

With weights, gradients and moments on the host, the host accumulates and updates while the device computes:

    compute stream   backward of n   backward of n-1        backward of n-2  ...      forward of 0   forward of 1 ...
    reduce stream                 '-> reduce n, copy n to pinned memory |C|  reduce n-1, copy n-1 ...
    backward thread                   submits n to the worker ---'
    worker thread                             |wait C| accumulates n, or updates the weights of n ...  updates 0, 1 ...

FSDP2 copies a reduced gradient to pinned memory without blocking the host only if the parameter has no hook (since
torch 2.13; before, it called a hook while the copy was in flight) and no gradient to add to. So parameters get no hook.
Instead the gradients of a unit are taken from `.grad` when FSDP2 reduces the next unit, which it reports by its
all-reduce hook, and the worker waits for an event on the stream of the copies. `UNITS_AHEAD` bounds the memory of
gradients that wait: if the host is slower than the device, backward waits for the host there.
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
from engine.parallel.fsdp import fsdp_modules, unit_parameters

UNITS_AHEAD = 2  # FSDP units whose gradients may wait for the worker

Staged = list[tuple[Tensor, Tensor]]  # (parameter, its gradient), both this rank's fp32 shards
Submit = Callable[[Callable[[], None]], "Future[None]"]  # runs calls one after another, in the order of submission


class Arrival(Protocol):
    """The completion of some copies, as torch.cuda.Event reports it."""

    def synchronize(self) -> None:
        """Block the calling thread until the copies are complete."""


class Updates:
    """Applies gradients to the weights after backward: clips them by their global norm, then steps the optimizer.

    Args:
        model: The sharded model.
        optimizer: Owns all parameters of `model`.
        max_grad_norm: Largest global 2-norm of the gradients; None disables clipping.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self._model, self._optimizer, self._max_grad_norm = model, optimizer, max_grad_norm

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """End a step after backward: clip, update, and free the gradients. Collective over all ranks.

        Args:
            taken: Called with the norm; returns whether to apply the update. Must be None if weights are updated in
                backward, where it is too late to refuse.

        Returns:
            The global 2-norm of the gradients before clipping, an fp32 scalar on the device of the gradients, equal on
            all ranks. Errors of updates that ran in another thread are raised here.
        """
        norm = clip_gradients(self._model.parameters(), self._max_grad_norm)
        if taken is None or taken(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def wait_pending(self) -> None:
        """Block until all weights are updated; raise errors of the updates. Forward passes wait on their own."""


def build_updates(config: RunConfig, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> Updates:
    """Choose the `Updates` for memory.optimizer_store and memory.optimizer_in_backward."""
    in_backward, arguments = config.memory.optimizer_in_backward, (model, optimizer, config.optimizer.max_grad_norm)
    if config.memory.optimizer_store == "host":
        if mesh.device.type != "cuda":  # copies are synchronous on a CPU, and a worker would compete for its cores
            return HostUpdates(*arguments, run_inline, lambda: None, in_backward=in_backward)
        return HostUpdates(*arguments, worker_thread(), blocking_event, in_backward=in_backward)
    return UpdatesInBackward(*arguments) if in_backward else Updates(*arguments)


class UpdatesInBackward(Updates):
    """Updates every weight in a hook on its gradient; only the sum of squares outlives the gradient.

    One optimizer owns all weights, as without this mode, so checkpoints are the same either way. A step from a hook
    finds one gradient and skips the other weights, at about 0.1 us each.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(model, optimizer, max_grad_norm)
        self._squares: dict[int, Tensor] = {}  # sum of squares of this step's gradient, float64, by id(parameter)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Return the gradient norm; see `Updates`. All weights are updated already."""
        assert taken is None
        squares, self._squares = self._squares, {}
        return _norm_of(squares.values())

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """Update one weight and free its gradient. FSDP2 calls it on the stream that reduced the gradient."""
        assert parameter.grad is not None
        assert id(parameter) not in self._squares, "a weight was updated with a part of its gradient"
        self._squares[id(parameter)] = square_sum([parameter.grad])
        self._optimizer.step()
        parameter.grad = None


class HostUpdates(Updates):
    """Accumulates gradients on the host during backward and updates weights during the next forward pass.

    Args:
        model, optimizer, max_grad_norm: See `Updates`.
        submit: Runs the host's work in order, in a worker thread or inline.
        arrival: Returns the completion of all copies started on the current stream so far; None: complete.
        in_backward: Update weights as soon as their gradients have arrived instead of accumulating them.
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
        self._squares: dict[Tensor, Tensor] = {}  # sum of squares of this step's gradient, float64, by parameter
        self._sums: dict[Tensor, Tensor] = {}  # gradient summed over the micro-steps so far, by parameter
        self._running: dict[Tensor, Future[None]] = {}  # updates that no forward pass has waited for, by parameter
        self._gradients = HostGradients(model, self._update if in_backward else self._add, submit, arrival)
        # In the order in which forward needs them: the root comes first, since it is gathered first.
        self._units: list[list[nn.Parameter]] = []
        for unit in fsdp_modules(model):
            assert isinstance(unit, nn.Module)
            self._units.append(parameters := unit_parameters(unit))
            # prepend: before FSDP2's own hook, which copies the shards to the device to gather them.
            unit.register_forward_pre_hook(partial(self._before_forward, parameters), prepend=True)

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`. Returns once the norm is known; updates may still run in the worker."""
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
        """Submit the update of every FSDP unit, in the order of the next forward pass."""
        # The trainer may set the next step's learning rate before these run, so copy the current one.
        groups = [
            group | {"lr": group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]}
            for group in self._optimizer.param_groups
        ]
        for unit in self._units:
            staged: Staged = [(parameter, self._sums.pop(parameter)) for parameter in unit if parameter in self._sums]
            if staged:
                done = self._submit(partial(self._step, staged, groups, norm))
                self._running |= dict.fromkeys((parameter for parameter, _ in staged), done)

    @torch.no_grad()
    def _step(self, staged: Staged, groups: list[dict[str, Any]], norm: Tensor | None = None) -> None:
        """Clip by `norm` if given, and step the optimizer on these parameters alone.

        Others may have a `.grad` whose copy to the host is still in flight, which a step of the optimizer would read.
        """
        for parameter, gradient in staged:
            parameter.grad = gradient
        chosen = dict(staged)
        if norm is not None and self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(chosen), self._max_grad_norm, norm, foreach=True)
        chosen_groups = [
            group | {"params": [parameter for parameter in group["params"] if parameter in chosen]} for group in groups
        ]
        # A second optimizer that shares the state of the first; copy.copy would drop attributes of subclasses.
        optimizer = object.__new__(type(self._optimizer))
        optimizer.__dict__ = vars(self._optimizer) | {"param_groups": chosen_groups}
        optimizer.step()
        for parameter in chosen:
            parameter.grad = None

    def _before_forward(self, parameters: Sequence[Tensor], *_: object) -> None:
        self._wait_for(parameters)

    def _wait_for(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if (done := self._running.pop(parameter, None)) is not None:
                done.result()


class HostGradients:
    """Takes gradients from the parameters of a sharded model during backward and passes them on; then call `finish`.

    Args:
        model: The sharded model, its shards on the host.
        use: Called through `submit` with the gradients of some parameters, in the order in which backward produced
            them; not called again after it has failed.
        submit: Runs the calls of `use` in order.
        arrival: Returns the completion of all copies started on the current stream so far; None: complete.
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
        """Take the remaining gradients after backward and block until all are used. Raises what `use` raised."""
        self._take()
        self._wait(0)

    def _before_unit(self, reduced: Tensor) -> None:
        """All-reduce hook of a unit: FSDP2 calls it after reducing the unit's gradients and before copying them.

        The copies of the units before were started by then, so their `.grad` is set.
        """
        if reduced.device.type == "cuda":
            # With an all-reduce hook FSDP2 copies on another stream than the one that allocated `reduced`, without
            # recording it: the allocator could reuse the memory before the copy has read it.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._take()

    def _take(self) -> None:
        self._wait(UNITS_AHEAD)
        # The worker may set `.grad` to a gradient that it was given (`_step`); do not take that a second time.
        given = {gradient for _, gradients in self._pending for gradient in gradients}
        pairs = [(parameter, parameter.grad) for parameter in self._parameters]
        staged = [(parameter, grad) for parameter, grad in pairs if grad is not None and grad not in given]
        if not staged:
            return
        for parameter, _ in staged:
            parameter.grad = None
        done = self._submit(partial(self._wait_and_use, self._arrival(), staged))
        self._pending.append((done, {gradient for _, gradient in staged}))

    def _wait(self, most: int) -> None:
        """Block until at most `most` units are pending, and raise errors of those that are done."""
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
    """Return a `Submit` that runs calls in one worker thread; the thread ends when the `Submit` is garbage."""
    return ThreadPoolExecutor(1, thread_name_prefix="host updates").submit


def run_inline(call: Callable[[], None]) -> Future[None]:
    """A `Submit` that runs the call in the calling thread before it returns."""
    call()
    done: Future[None] = Future()
    done.set_result(None)
    return done


def blocking_event() -> Arrival:
    """Record an event on the current CUDA stream. Blocking: a thread that waits for it sleeps instead of spinning."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _norm_of(squares: Iterable[Tensor]) -> Tensor:
    """Return the `global_norm` of the gradients whose `square_sum`s are `squares`. Collective over all ranks."""
    values = list(squares)
    assert values, "the step produced no gradient"
    return global_norm(torch.stack(values).sum())
