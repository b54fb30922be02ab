"""The checks catch broken plans: what falsifies float64 numbers is found by counting, at least 99 times in 100.

The judge is numerical and independent of the counting records: a mutant is a real fault when the executor raises or the
float64 result differs from dense attention, under the late or the eager transport, with all buffers poisoned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from testkit.attention_oracle import Group, build_group, causal, errors, oracle, random_inputs, ring_method
from testkit.counting import prove_pair

from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.program.ops import Step, View
from engine.planning.schedules.dispatch import plan_dispatch
from engine.planning.schedules.plan import PlanPair
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import Visibility

MUTANTS = 50  # of every plan
RINGS = [ring_method(3), ring_method(3, layout="striped", backward_circulates="q"), ring_method(2, 2)]


def groups() -> Iterator[Group]:
    """Rings, and tiles that are computed by ranks that own neither operand."""
    for method in RINGS:
        yield build_group(method, Mask(2 * method.cp_size + 1), ReferenceKernel())
    ring = build_group(RINGS[0], Mask(7), ReferenceKernel())
    visible = Visibility(Mask(7), ring.blocks.ring)
    plans = PlanPair(*(plan_dispatch(visible, lambda i, j: (i + 2 * j) % 3, way) for way in ("forward", "backward")))
    yield replace(ring, plans=plans)


def mutants(plans: PlanPair, seed: int) -> Iterator[tuple[str, PlanPair]]:
    """What is broken, and the plans with that one fault."""
    rng = random.Random(seed)
    for _ in range(MUTANTS):
        direction = rng.choice(["forward", "backward"])
        plan = getattr(plans, direction)
        rank = rng.choice(list(plan.ranks))
        what, steps = broken(list(plan.ranks[rank].steps), rng)
        changed = replace(plan, ranks={**plan.ranks, rank: replace(plan.ranks[rank], steps=tuple(steps))})
        yield f"{direction} of rank {rank}: {what}", replace(plans, **{direction: changed})


def broken(steps: list[Step], rng: random.Random) -> tuple[str, list[Step]]:
    """Something of a step is left out, done twice, a step later (the last: at first) or to other rows."""
    phases = ("pre", "post", "tiles", "wait", "after")
    number, phase = rng.choice([(n, name) for n, step in enumerate(steps) for name in phases if getattr(step, name)])
    items = list(getattr(steps[number], phase))
    place = rng.randrange(len(items))
    item = items.pop(place)
    fault = rng.choice(["dropped", "doubled", "late", "moved"])
    items[place:place] = {"doubled": [item, item], "moved": [moved(item, rng)]}.get(fault, [])
    steps[number] = replace(steps[number], **{phase: tuple(items)})
    if fault == "late":
        later = (number + 1) % len(steps)
        steps[later] = replace(steps[later], **{phase: (*getattr(steps[later], phase), item)})
    return f"{phase} {item} of step {number} {fault}", steps


def moved(item: Any, rng: random.Random) -> Any:
    """A message's number is another; of an operation, a tile or a transfer one view is."""
    names = ("dst", "src", "view", "q", "kv", "sums", "kv_sums")
    views = [(name, view) for name in names if isinstance(view := getattr(item, name, None), View)]
    if not views:
        return item + 1
    name, view = rng.choice(views)
    changes = [view._replace(buffer=view.buffer + 1), View(view.buffer, view.start + 1, view.stop + 1)]
    return item._replace(**{name: rng.choice(changes)})


def test_counting_finds_what_falsifies_numbers() -> None:
    faults, missed = 0, []
    cases = list(groups())
    for seed, whole in enumerate(cases):
        rows = whole.blocks.rank_layout.seq_len
        inputs = random_inputs(rows, 2, 1, head_dim=4)
        want = oracle(inputs, causal(rows))

        def is_right(group: Group, inputs=inputs, want=want) -> bool:
            return max(errors(group.run(inputs).values, want).values()) < 1e-10

        def is_proven(group: Group, rows: int = rows) -> bool:
            prove_pair(group.plans, Mask(rows), group.blocks, late=group.late)
            return True

        def both(check: Any, plans: PlanPair, whole: Group = whole) -> bool:
            try:
                return all(check(replace(whole, plans=plans, late=late, wire=torch.float64)) for late in (True, False))
            except Exception:  # any failure of a broken plan is a fault made visible
                return False

        assert both(is_right, whole.plans)
        assert both(is_proven, whole.plans)
        for what, plans in mutants(whole.plans, seed):
            if not both(is_right, plans):
                faults += 1
                missed += [what] if both(is_proven, plans) else []
    assert faults >= len(cases) * MUTANTS // 2, faults  # the mutations do break plans
    assert len(missed) <= faults // 100, (len(missed), faults, missed)
