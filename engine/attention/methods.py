"""From a method, a mask and a layout to the plans of both passes. No torch: previews and tests plan here too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.attention.grid import Grid
from engine.attention.layout import Layout
from engine.attention.mask import Mask, Visibility
from engine.attention.plan import AttentionPlan
from engine.attention.planners.ring import Ring, plan_backward, plan_forward, preferred_direction
from engine.attention.presets import AttentionMethod


@dataclass(frozen=True)
class PlanPair:
    """Forward and backward plans of the same method, mask and layout."""

    forward: AttentionPlan
    backward: AttentionPlan


@dataclass(frozen=True)
class Blocks:
    """Who holds what: `home` rows of every rank between the layers, `ring` rows of every ring member inside attention.

    With head parallelism a ring member's block is the concatenation of its head group's pieces.
    """

    grid: Grid
    home: Layout
    ring: Layout


def plan_method(method: AttentionMethod, mask: Mask, layout: Layout, rank: int | None = None) -> PlanPair:
    """Both plans of a method, for one rank or (None) for all ranks."""
    visibility = Visibility(mask, layout)
    only = None if rank is None else (rank,)
    ring = Ring(
        method.ring_inner_size,
        method.ring_outer_size,
        direction=preferred_direction("kv", method.ring_outer_size, backward=False),
        narrow_gradients=method.gradient_wire_dtype != "float32",
    )
    circulates = method.backward_circulates
    direction = preferred_direction(circulates, method.ring_outer_size, backward=True)
    return PlanPair(
        plan_forward(visibility, ring, only),
        plan_backward(visibility, replace(ring, direction=direction), circulates, only),
    )
