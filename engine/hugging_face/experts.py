"""Routers of mixtures of experts: statistics, and the auxiliary loss by shares.

transformers' loss over all layers and unmasked rows (Switch Transformer, Fedus et al. 2021, equations 4 to 6) is

    aux = E * sum_e C_e P_e / R^2       C assignments to expert e, P sum of its router probabilities, R rows x layers

C and R are constants for the gradient and are summed over ranks, one message per forward pass. Rank r's share is
E * sum_e C_e(all) P_e(r) / R(all)^2: shares add up to the loss, and their gradients to its gradient, whatever the
sharding. A mean of per-rank losses would not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.config.errors import ConfigError
from engine.distributed.collectives import sum_over_ranks


class Routers(NamedTuple):
    """The routers of a model.

    Attributes:
        by_layer: The router modules of every layer, empty for dense ones.
        logits_at: Index of the logits in a router's output, where that is a tuple.
        top_k: Experts per token.
        coefficient: Weight of the auxiliary loss; 0: the model is trained without it.
    """

    by_layer: tuple[tuple[nn.Module, ...], ...]
    logits_at: int
    top_k: int
    coefficient: float


class Routed(NamedTuple):
    """What the routers of one layer chose for the local rows.

    Attributes:
        probabilities: Sum over rows of every expert's probability, [E], differentiable.
        counts: Rows assigned to every expert, [E].
    """

    probabilities: Tensor
    counts: Tensor


class RouterStatistics:
    """Collects `Routed` of the layers of one forward pass.

    Args:
        routers: Of the model.
        real: Which of the local rows count, [T] bool; the others are padding.
    """

    def __init__(self, routers: Routers, real: Tensor) -> None:
        self._routers, self.real = routers, real
        self._routed: list[Routed] = []

    def add(self, routed: Routed) -> None:
        """Add a layer, in order."""
        self._routed.append(routed)

    def of_logits(self, logits: Sequence[Tensor]) -> Routed:
        """Return what one layer's routers chose by their logits, each [B * T, E] or [B, T, E]."""
        parts = []
        for each in logits:
            rows = each.reshape(-1, each.shape[-1])
            keep = self.real.repeat(rows.shape[0] // self.real.shape[0])
            weights = rows.softmax(dim=-1)
            chosen = weights.detach().topk(self._routers.top_k, dim=-1).indices  # [B * T, top_k]
            one_hot = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
            counts = (one_hot * keep[:, None]).sum(0, dtype=torch.float32)
            parts.append(((weights.float() * keep[:, None]).sum(0), counts))
        probabilities, assigned = (torch.stack(tensors).sum(0) for tensors in zip(*parts, strict=True))
        return Routed(probabilities, assigned)

    def auxiliary_loss(self) -> Tensor | None:
        """See `engine.model.decoder.Routing`."""
        if not self._routers.coefficient or not self._routed:
            return None
        counts = sum_over_ranks(self.counts.sum(0).double())  # [E]
        rows = counts.sum() / self._routers.top_k  # not read by the host, which would wait for the device
        probabilities = torch.stack([routed.probabilities for routed in self._routed]).sum(0)
        share: Tensor = ((counts / rows.square()).float() * probabilities).sum()
        return self._routers.coefficient * len(counts) * share

    @property
    def counts(self) -> Tensor:
        """See `engine.model.decoder.Routing`."""
        return torch.stack([routed.counts for routed in self._routed])


@contextlib.contextmanager
def router_logits(routers: Sequence[nn.Module], index: int) -> Iterator[list[Tensor]]:
    """Inside the body the list gets the logits of `routers`, in the order of their calls."""
    found: list[Tensor] = []

    def take(module: nn.Module, args: Any, output: Any) -> None:
        found.append(output[index] if isinstance(output, tuple) else output)

    handles = [router.register_forward_hook(take) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def find_routers(model: Any, layers: Iterable[nn.Module]) -> Routers | None:
    """Return the routers of a transformers model whose outputs its class declares; None if it declares none.

    Raises:
        ConfigError: config.output_router_logits asks for an auxiliary loss that is not `auxiliary_loss`.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    wanted = bool(getattr(model.config, "output_router_logits", False))
    if recorder is None:
        if wanted:
            raise ConfigError("config.output_router_logits is true, but transformers records no router logits of it")
        return None
    if not isinstance(getattr(recorder, "target_class", recorder), type):
        if wanted:
            raise ConfigError(
                "config.output_router_logits is true, but its routers are recorded in a way not known here"
            )
        return None
    kind, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    part = getattr(recorder, "layer_name", None) or ""
    by_layer = tuple(
        tuple(module for name, module in layer.named_modules() if isinstance(module, kind) and part in name)
        for layer in layers
    )
    if not any(by_layer):
        return None
    top_k = getattr(model.config, "num_experts_per_tok", None)
    coefficient = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0) if wanted else 0.0
    if top_k is None:
        if coefficient:
            raise ConfigError("config.output_router_logits is true, but the config has no num_experts_per_tok")
        return None
    if coefficient:
        _check_loss(model, int(top_k))
    return Routers(by_layer, index, int(top_k), coefficient)


def _check_loss(model: Any, top_k: int) -> None:
    """Raise ConfigError unless transformers' auxiliary loss of this family has the values of `auxiliary_loss`."""
    function: Callable[..., Any] | None = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    generator = torch.Generator().manual_seed(0)
    experts = max(top_k + 1, 4)
    gates = [torch.randn(6, experts, generator=generator) for _ in range(2)]
    real = torch.tensor([True] * 5 + [False])
    ours = RouterStatistics(Routers((), 0, top_k, 1.0), real)
    routed = [ours.of_logits([gate]) for gate in gates]
    counts = sum(each.counts for each in routed)
    probabilities = sum(each.probabilities for each in routed)
    expected = (counts * probabilities).sum() * experts / (2 * 5) ** 2  # type: ignore[union-attr]
    try:
        theirs = None if function is None else function(tuple(gates), experts, top_k, real[None].long())
    except Exception:
        theirs = None
    if not isinstance(theirs, Tensor) or not torch.allclose(theirs, expected, rtol=1e-5):
        raise ConfigError(
            "config.output_router_logits is true, but the auxiliary loss of this family is not that of the Switch "
            "Transformer, which is the one known here; set it to false to train without"
        )
