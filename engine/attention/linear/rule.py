"""What an implementation of the gated delta rule is given, and what it is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from engine.attention.linear.sequence import LinearSequence


class DeltaInputs(NamedTuple):
    """Rows of one rank, as a model has them.

    q, k           [B, T, Hk, dk]; H // Hk heads of v after each other share one of q and k
    v              [B, T, H, dv]
    g              logarithm of the decay, at most 0: [B, T, H], or [B, T, H, dk] for KDA
    beta           [B, T, H]
    normalizes_qk  q and k are to be given unit length first
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    normalizes_qk: bool = False

    @property
    def has_channel_gate(self) -> bool:
        """Whether every channel of k decays by itself (KDA)."""
        return self.g.dim() == self.k.dim()


class DeltaRule(Protocol):
    """An implementation of the gated delta rule; `name` is for messages. Outputs are scaled by 1/sqrt(dk)."""

    name: str

    def __call__(self, inputs: DeltaInputs, sequence: LinearSequence) -> Tensor:
        """Return out [B, T, H, dv] in the dtype of v. Collective, see `gated_delta_rule`."""
