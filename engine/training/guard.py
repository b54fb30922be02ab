"""Judges optimizer steps before they touch the weights. Standard library only; all ranks judge the same numbers alike.

A spike is a loss above median + spike_deviations * deviation of the last WINDOW_STEPS losses that were taken, where
deviation = 1.4826 * median(|loss - median|), which for normal noise is its standard deviation and which a few outliers
do not move (Rousseeuw and Croux 1993), but at least one percent of the median.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from engine.config.errors import RunError
from engine.config.settings import GuardConfig, Reaction

WINDOW_STEPS = 64
ENOUGH_LOSSES = 8  # fewer tell nothing about a spike
MOST_IN_A_ROW = 5  # steps without progress that are dropped before the run stops
_NORMAL = 1.4826
_LEAST_DEVIATION = 0.01  # of the median

Action = Literal["take", "skip", "rewind", "no_labels"]


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why if it is dropped."""

    action: Action = "take"
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether the weights are updated."""
        return self.action == "take"


TAKEN = Verdict()
NO_LABELS = Verdict("no_labels", "no token of its batch has a label")  # not judged: there is no loss


class Guard:
    """Remembers the losses of steps that were taken; its state belongs to a checkpoint."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._in_a_row = 0
        self._last_dropped = -1

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """The verdict on step `step` (from 0). Raises RunError when the run is to stop."""
        found = self._problem(loss, grad_norm)
        if found is None:
            self._losses.append(loss)
            if step > self._last_dropped:
                self._in_a_row = 0
            return TAKEN
        figure, value, reaction = found
        words = f"{figure} of step {step + 1} is {value}"
        if reaction == "stop":
            raise RunError(
                f"{words}: training has diverged. Lower optimizer.learning_rate, raise optimizer.warmup_steps or set "
                "optimizer.max_grad_norm, and check the data; nothing after this step would be of use, so the run "
                "stops here"
            )
        self._in_a_row += 1
        self._last_dropped = max(step, self._last_dropped)
        if self._in_a_row > MOST_IN_A_ROW:
            raise RunError(
                f"{words}, and {MOST_IN_A_ROW} steps before it were dropped without progress. Lower "
                "optimizer.learning_rate, and look at the samples that events.jsonl names"
            )
        return Verdict(reaction, f"{figure} is {value}")

    def _problem(self, loss: float, grad_norm: float) -> tuple[str, str, Reaction] | None:
        """(a figure, its value, what is to be done about it) where one is bad."""
        for figure, value in (("the loss", loss), ("the gradient norm", grad_norm)):
            if not math.isfinite(value):
                return figure, str(value), self.config.on_nonfinite
        limit = self.limit()
        if limit is not None and loss > limit:
            return "the loss", f"{loss:.4g}, above {limit:.4g}", self.config.on_spike
        return None

    def limit(self) -> float | None:
        """Loss above which a step is a spike; None while too few are known, or where none is."""
        if self.config.spike_deviations is None or len(self._losses) < ENOUGH_LOSSES:
            return None
        middle = median(self._losses)
        deviation = max(_NORMAL * median(abs(loss - middle) for loss in self._losses), _LEAST_DEVIATION * abs(middle))
        return middle + self.config.spike_deviations * deviation

    def state(self) -> dict[str, Any]:
        """JSON values from which `load` makes the same guard."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row, "last_dropped": self._last_dropped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.rewound(state)
        self._in_a_row, self._last_dropped = state["in_a_row"], state["last_dropped"]

    def rewound(self, state: Mapping[str, Any]) -> None:
        """Takes up the losses of the checkpoint that training is back at; what was dropped stays counted."""
        self._losses = deque(state["losses"], maxlen=WINDOW_STEPS)
