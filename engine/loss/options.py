"""What both losses need to know."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.data.sampler import IGNORE_INDEX


@dataclass(frozen=True)
class LossOptions:
    """Constants of a loss: rows walked at once, weight of lse**2 (z-loss), the label that does not count."""

    chunk_tokens: int = 2048
    z_loss: float = 0.0
    ignore_index: int = IGNORE_INDEX


def check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raises ValueError unless hidden is [T, d], weight [V, d] and labels [T]."""
    are_matrices = hidden.dim() == 2 and weight.dim() == 2
    if are_matrices and hidden.shape[1] == weight.shape[1] and labels.shape == hidden.shape[:1]:
        return
    raise ValueError(
        f"the loss got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}; "
        "expected [T, d], [V, d] and [T]"
    )
