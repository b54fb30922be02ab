"""When weights are updated: all after backward, or each inside it, as soon as its gradient is complete.

    after backward   all gradients live at once (4 bytes per parameter of this rank's shards), so they can be clipped
    in backward      those of one FSDP unit do; each is used and freed before the next unit's are reduced

On the device an update in backward runs from a hook that FSDP2 calls once a shard's gradient is reduced (pytorch pull
request 129450); on the host beside backward, see `engine.host_updates`. By then the unit's backward has read its
weights for the last time, and a weight of two modules (tied embeddings) has the gradients of both: FSDP2 reduces such a
unit at the end of backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.config import RunConfig
from engine.config_checks import update_in_backward_problems
from engine.errors import ConfigError
from engine.host_updates import (
    Arrival,
    HostGradients,
    Inline,
    Staged,
    Worker,
    WorkerThread,
    blocking_event,
    nothing_to_wait_for,
)
from engine.optim import clip_gradients
from engine.parallel.mesh import Mesh
from engine.parallel.reduce import sum_over_ranks


class Updates(Protocol):
    """Brings gradients into the weights."""

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Ends a step after backward; no gradient is left. All ranks must call.

        Gives the global 2-norm of the gradients before clipping: fp32 scalar where the gradients lie, equal on all
        ranks. `taken` may refuse the update when it has seen that norm.
        """
        ...


def build_updates(config: RunConfig, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> Updates:
    """The updates that the configuration wants; `optimizer` must own the parameters of the sharded `model`.

    Raises ConfigError where updates in backward cannot do what else is asked for.
    """
    in_backward, max_grad_norm = config.memory.optimizer_in_backward, config.optimizer.max_grad_norm
    if in_backward and (problems := list(update_in_backward_problems(config))):
        raise ConfigError(problems)
    after = UpdateAfterBackward(model, optimizer, max_grad_norm)
    if config.memory.optimizer_store == "host":
        on_gpu = mesh.device.type == "cuda"
        worker, arrival = (WorkerThread(), blocking_event) if on_gpu else (Inline(), nothing_to_wait_for)
        return HostUpdates(after, worker, arrival, in_backward=in_backward)
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
        self._norm = _GradientNorm()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`; by now all weights are updated."""
        assert taken is None
        self._updated.clear()
        return self._norm.take()

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """Runs on the stream that reduced the gradient."""
        assert parameter.grad is not None
        assert id(parameter) not in self._updated, "a weight was updated with a part of its gradient"
        self._updated.add(id(parameter))
        self._norm.add(parameter.grad)
        self._optimizer.step()
        parameter.grad = None


class HostUpdates:
    """Adds gradients up on the host, or updates weights there, beside backward (see `engine.host_updates`)."""

    def __init__(
        self,
        after: UpdateAfterBackward,
        worker: Worker,
        arrival: Callable[[], Arrival | None],
        *,
        in_backward: bool,
    ) -> None:
        self._after = after
        self._in_backward = in_backward
        self._norm = _GradientNorm()
        self._sums: dict[Tensor, Tensor] = {}  # by parameter, over the micro-steps so far
        self._gradients = HostGradients(after.model, self._update if in_backward else self._add, worker, arrival)

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`. Raises what went wrong beside backward."""
        self._gradients.finish()
        if self._in_backward:
            assert taken is None
            return self._norm.take()
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
            self._norm.add(gradient)
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


class _GradientNorm:
    """The global 2-norm of gradients that are added one after the other, and need not outlive that."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None  # float64 scalar where the gradients lie

    def add(self, gradient: Tensor) -> None:
        squares = _square_sum(gradient)
        self._squares = squares if self._squares is None else self._squares + squares

    def take(self) -> Tensor:
        """fp32 scalar, equal on all ranks, which must call; begins anew."""
        assert self._squares is not None, "no gradient came"
        norm = sum_over_ranks(self._squares).sqrt().float()
        self._squares = None
        return norm


def _square_sum(gradient: Tensor) -> Tensor:
    """This rank's share of the squared 2-norm: what several ranks hold alike they share equally. float64 scalar."""
    copies = 1
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        copies = math.prod(mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate())
        gradient = gradient.to_local()
    squares: Tensor = torch.linalg.vector_norm(gradient).double().square()
    return squares / copies
