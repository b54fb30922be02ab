"""Inputs of the loss, and what a loss makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.settings import LossConfig
from engine.data.sampler import IGNORE_INDEX
from engine.loss.fused import VocabularyRanks
from engine.parallel.tensor import vocabulary_ranks

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(rows: int, vocab: int, size: int, *, ignored: float = 0.2, spread: float = 1.0) -> Inputs:
    """hidden [rows, size], weight [vocab, size], both float64 with gradient, and labels [rows]."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, size, dtype=torch.float64, generator=generator) * spread
    weight = torch.randn(vocab, size, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def in_dtype(inputs: Inputs, *dtypes: torch.dtype) -> Inputs:
    """The same numbers, rounded."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=False))
    return hidden, weight, inputs[2]


def part_of(inputs: Inputs) -> Inputs:
    """This rank's rows, its slice of the vocabulary, the labels of its rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight = (x.detach().chunk(ranks)[rank].clone().requires_grad_() for x in inputs[:2])
    return hidden, weight, inputs[2].chunk(ranks)[rank]


def world() -> VocabularyRanks:
    """All ranks, each with a slice."""
    assert dist.group.WORLD is not None
    return vocabulary_ranks(dist.group.WORLD)


def value_and_gradients(function: Any, inputs: Inputs, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Loss, dhidden, dweight of `scale * function(...)`."""
    hidden, weight, labels = inputs
    loss = function(hidden, weight, labels, options=LossConfig(**options))
    return [loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))]


def assert_exact(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Float64 sums of a few hundred terms in another order."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of `exact`."""
    return float((value.double() - exact).norm() / exact.norm())
