"""When weights are updated: all after backward, or each inside it, as soon as its gradient is complete.

    after backward   all gradients live at once (4 bytes per parameter of this rank's shards), so they can be clipped
    in backward      those of one FSDP unit do; each is used and freed before the next unit's are reduced

In backward an update runs from a hook that FSDP2 calls once a shard's gradient is reduced (pytorch pull request
129450). By then the unit's backward has read its weights for the last time, and a weight of two modules (tied
embeddings) has the gradients of both: FSDP2 reduces such a unit at the end of backward.
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
    if not config.memory.optimizer_in_backward:
        return UpdateAfterBackward(model, optimizer, config.optimizer.max_grad_norm)
    if problems := update_in_backward_problems(config):
        raise ConfigError([problem.text for problem in problems])
    return UpdateInBackward(model, optimizer, mesh.device)


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

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._updated: set[int] = set()  # ids of the parameters of this step
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._squares = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)  # type: ignore[no-untyped-call]

    def finish(self, taken: Callable[[Tensor], bool] | None = None) -> Tensor:
        """See `Updates`; by now all weights are updated."""
        assert taken is None
        norm = sum_over_ranks(self._squares).sqrt().float()
        self._squares = torch.zeros_like(self._squares)
        self._updated.clear()
        return norm

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """Runs on the stream that reduced the gradient."""
        assert parameter.grad is not None
        assert id(parameter) not in self._updated, "a weight was updated with a part of its gradient"
        self._updated.add(id(parameter))
        if parameter.device.type == "cpu" and self._device.type == "cuda":
            # Up to torch 2.12 FSDP2 calls hooks while the gradient is still on its way to host memory.
            torch.cuda.current_stream(self._device).synchronize()
        self._squares += _square_sum(parameter.grad)
        self._optimizer.step()
        parameter.grad = None


def _square_sum(gradient: Tensor) -> Tensor:
    """This rank's share of the squared 2-norm: what several ranks hold alike they share equally. float64 scalar."""
    copies = 1
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        copies = math.prod(mesh.size(dim) for dim, place in enumerate(gradient.placements) if place.is_replicate())
        gradient = gradient.to_local()
    squares: Tensor = torch.linalg.vector_norm(gradient).double().square()
    return squares / copies
