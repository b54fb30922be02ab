"""Attention run again in backward, for the queries whose results were not kept: which rows, and what the plan is given.

Results of queries at positions before a cut are computed again, those of all later ones were kept. Rows of a rank
ascend in position, so that what is computed again are its first rows:

    cut=8, zigzag on 2 ranks     rank 0: 0 1 2 3 | 12 13 14 15     rank 1: 4 5 6 7 | 8 9 10 11
    again                                0 1 2 3                           4 5 6 7

Causal attention of a share c of the sequence costs c**2 of the whole, and only keys that those queries see travel.
Source: Sun et al. 2025 (BurstEngine, sequence-level selective checkpointing: striped layout, causal, c = 1/2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.attention.plan import AttentionPlan


@dataclass(frozen=True)
class RecomputePlan(AttentionPlan):
    """A forward plan that runs again for the first `recomputed_rows[rank]` rows of every rank's ring block.

    Pins as in forward, with these differences:

    acc      only those first rows
    saved    (after a head exchange, or in chunks) is given by the caller with what was kept in all other rows; the
             plan writes the first rows, and after an exchange sends out of all rows home
    """

    recomputed_rows: Mapping[int, int] = field(default_factory=dict)

    def validate(self) -> None:
        """Raise PlanError naming every rule that the plan breaks (see `engine.attention.validate`)."""
        from engine.attention.validate import check_plan

        check_plan(self, self.recomputed_rows)
