"""Rows of a layer's tensors, a tile at a time, and the gradients that its tiles add up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.row_blocks import accumulate_dtype


class LayerGradients:
    """Gradient of a layer's input, and sums over tiles of its parameters', in fp32 (float64 for float64)."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._dx: Tensor | None = None
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._sweeps = 0

    def add(self, outputs: Sequence[Tensor], flowing: Sequence[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of `inputs`, given those of `outputs`; the parameters' are added up."""
        found = torch.autograd.grad(outputs, [*inputs, *self._parameters], flowing, allow_unused=True)
        of_parameters: Sequence[Tensor | None] = found[len(inputs) :]
        for index, gradient in enumerate(of_parameters):
            if gradient is None:  # of the layer's other half
                continue
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient
                continue
            wide = accumulate_dtype(gradient.dtype)
            self._sums[index] = total.to(wide).add_(gradient)  # the only tile's gradient is never widened
        return found[: len(inputs)]

    def add_input(self, rows: slice, dx: Tensor, whole: Tensor) -> None:
        """Adds to the input's gradient; every row is named by the first sweep over the rows before the second begins.

        dx [B, n, d] of `rows`, all of them: slice(None); `whole` [B, T, d] has the shape of the gradient.
        """
        if rows == slice(None):
            self._dx = dx if self._dx is None else self._dx.add_(dx)
            return
        if self._dx is None:
            self._dx = torch.empty(whole.shape, dtype=dx.dtype, device=dx.device)
        if rows.start == 0:
            self._sweeps += 1
        if self._sweeps == 1:
            self._dx[:, rows] = dx
        else:
            self._dx[:, rows] += dx

    @property
    def dx(self) -> Tensor:
        """Gradient of the input [B, T, d]."""
        assert self._dx is not None
        return self._dx

    def of_parameters(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes."""
        pairs = zip(self._sums, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def fetched(x: Tensor, device: torch.device) -> Tensor:
    """x, contiguous, on `device`. A cast or a gap would be the host's work, ahead of copies to x still in flight."""
    assert x.is_contiguous() or x.device == device
    return x.to(device, non_blocking=True)


def hidden_rows(hidden: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Rows of [B, T, d] on `device`."""
    if hidden.device == device:
        return hidden[:, rows]
    return torch.stack([fetched(sequence[rows], device) for sequence in hidden])


def leaf(x: Tensor) -> Tensor:
    """x, to differentiate with respect to."""
    return x.detach().requires_grad_()


def fold(x: Tensor) -> Tensor:
    """[n, B*heads, D] from [B, n, heads, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, batch: int) -> Tensor:
    """[B, n, heads, D] from [n, B*heads, D]."""
    return x.view(x.shape[0], batch, -1, x.shape[2]).transpose(0, 1)
