"""Settings of the guard against steps that would spoil a run, under train.guard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config_schema import note

Reaction = Literal["stop", "skip", "rewind"]


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient is no number, or whose loss leaps."""

    on_nonfinite: Reaction = field(
        default="stop",
        metadata=note(
            "loss or gradient norm is NaN or infinite; stop: the run ends, skip: the weights stay as they were, "
            "rewind: back to the newest checkpoint, and on with the data after this step's"
        ),
    )
    on_spike: Reaction = field(default="skip", metadata=note("the loss is far above those before it; as on_nonfinite"))
    spike_deviations: float | None = field(
        default=None,
        metadata=note("how many deviations above the recent median a loss is a spike; null: none is", above=0),
    )
    window_steps: int = field(
        default=64, metadata=note("recent steps that a loss is compared with", "steps", at_least=8)
    )
    most_in_a_row: int = field(
        default=5, metadata=note("steps without progress that are dropped before the run stops", "steps", at_least=1)
    )

    @property
    def reactions(self) -> frozenset[Reaction]:
        """All that may happen."""
        return frozenset({self.on_nonfinite, *(() if self.spike_deviations is None else (self.on_spike,))})

    @property
    def may_drop(self) -> bool:
        """Whether a step is judged before its weights are updated."""
        return self.reactions != {"stop"} or self.spike_deviations is not None
