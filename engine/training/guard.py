"""Decides whether an optimizer step is applied, from its loss and gradient norm. Standard library only.

All ranks see the same numbers, so they decide alike. A spike is a loss above median + spike_deviations * deviation over
the last WINDOW_STEPS accepted losses. deviation = 1.4826 * median(|loss - median|) is the standard deviation for normal
noise and is robust to a few outliers (Rousseeuw and Croux 1993); it is at least one percent of the median.
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
ENOUGH_LOSSES = 8  # with fewer accepted losses no step counts as a spike
MOST_IN_A_ROW = 5  # consecutive dropped steps before the run stops
_NORMAL = 1.4826
_LEAST_DEVIATION = 0.01  # of the median

Action = Literal["take", "skip", "rewind", "no_labels"]


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and the reason if it is dropped."""

    action: Action = "take"
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Return whether the weights are updated."""
        return self.action == "take"


TAKEN = Verdict()
NO_LABELS = Verdict("no_labels", "no token of its batch has a label")  # not judged: there is no loss


class Guard:
    """Judges steps by the losses of the accepted ones; its state is part of a checkpoint."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._in_a_row = 0
        self._last_dropped = -1

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Return the verdict on step `step` (from 0). Raises RunError when the run must stop."""
        problem = self._problem(loss, grad_norm)
        if problem is None:
            self._losses.append(loss)
            if step > self._last_dropped:
                self._in_a_row = 0
            return TAKEN
        figure, value, reaction = problem
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
        """Return the first bad figure, its value and the configured reaction; None if all are good."""
        for figure, value in (("the loss", loss), ("the gradient norm", grad_norm)):
            if not math.isfinite(value):
                return figure, str(value), self.config.on_nonfinite
        limit = self.limit()
        if limit is not None and loss > limit:
            return "the loss", f"{loss:.4g}, above {limit:.4g}", self.config.on_spike
        return None

    def limit(self) -> float | None:
        """Return the loss above which a step is a spike; None with too few losses or spike detection off."""
        if self.config.spike_deviations is None or len(self._losses) < ENOUGH_LOSSES:
            return None
        middle = median(self._losses)
        deviation = max(_NORMAL * median(abs(loss - middle) for loss in self._losses), _LEAST_DEVIATION * abs(middle))
        return middle + self.config.spike_deviations * deviation

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for `load`."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row, "last_dropped": self._last_dropped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.rewound(state)
        self._in_a_row, self._last_dropped = state["in_a_row"], state["last_dropped"]

    def rewound(self, state: Mapping[str, Any]) -> None:
        """Restore the losses of the checkpoint that training was rewound to; the count of dropped steps stays."""
        self._losses = deque(state["losses"], maxlen=WINDOW_STEPS)
