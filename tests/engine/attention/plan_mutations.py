"""Broken variants of a plan, one small fault each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.attention.plan import AttentionPlan, LocalOp, RankPlan, Step, Tile, Transfer, View


@dataclass(frozen=True)
class Mutant:
    """A plan with one fault and what the fault is."""

    what: str
    plan: AttentionPlan


def mutants(plan: AttentionPlan, count: int, seed: int) -> list[Mutant]:
    """Up to `count` mutants, evenly over the kinds of fault."""
    generator = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in _all(plan):
        by_kind.setdefault(mutant.what.split(":")[0], []).append(mutant)
    for group in by_kind.values():
        generator.shuffle(group)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_kind.values()):
        chosen += [group.pop() for group in by_kind.values() if group]
    return chosen[:count]


def _all(plan: AttentionPlan) -> Iterator[Mutant]:
    for rank, rank_plan in plan.ranks.items():
        for position, step in enumerate(rank_plan.steps):
            for what, changed in _step_faults(rank_plan, step):
                yield Mutant(f"{what} (rank {rank}, step {step.index})", _with(plan, rank, position, changed))
        yield from _slot_faults(plan, rank, rank_plan)
    yield from _message_faults(plan)


def _with(plan: AttentionPlan, rank: int, position: int, step: Step) -> AttentionPlan:
    steps = list(plan.ranks[rank].steps)
    steps[position] = step
    return replace(plan, ranks={**plan.ranks, rank: replace(plan.ranks[rank], steps=tuple(steps))})


def _without(items: tuple, index: int) -> tuple:
    return items[:index] + items[index + 1 :]


def _step_faults(plan: RankPlan, step: Step) -> Iterator[tuple[str, Step]]:
    for i, tile in enumerate(step.tiles):
        yield "tile dropped:", replace(step, tiles=_without(step.tiles, i))
        yield "tile doubled:", replace(step, tiles=(*step.tiles, tile))
        for what, changed in _tile_faults(tile, plan):
            yield what, replace(step, tiles=(*step.tiles[:i], changed, *step.tiles[i + 1 :]))
    for phase in ("pre", "after"):
        ops = getattr(step, phase)
        for i, op in enumerate(ops):
            yield f"{phase} {op.op} dropped:", replace(step, **{phase: _without(ops, i)})
            if op.op == "add":
                yield "add doubled:", replace(step, after=(*step.after, op))
                yield "add before its wait:", replace(step, after=_without(ops, i), pre=(*step.pre, op))
            for moved in _moved(op.dst, plan):
                yield (
                    "op into other rows:",
                    replace(step, **{phase: (*ops[:i], LocalOp(op.op, moved, op.src), *ops[i + 1 :])}),
                )
    if step.pre and step.tiles:
        yield "pre ops run after the tiles:", replace(step, pre=(), after=(*step.pre, *step.after))


def _tile_faults(tile: Tile, plan: RankPlan) -> Iterator[tuple[str, Tile]]:
    for name in ("q", "kv", "acc", "acc_kv"):
        view = getattr(tile, name)
        if view is not None:
            for moved in _moved(view, plan):
                yield f"tile {name} in other rows:", replace(tile, **{name: moved})
    yield "band shifted:", replace(tile, low=(tile.low or 0) + 1)
    if tile.low is not None:
        yield "band opened:", replace(tile, low=None)


def _moved(view: View, plan: RankPlan) -> Iterator[View]:
    slot = plan.slots[view.slot]
    if view.stop < slot.rows:
        yield View(view.slot, view.start + 1, view.stop + 1)
    if view.start > 0:
        yield View(view.slot, view.start - 1, view.stop - 1)
    for index, other in enumerate(plan.slots):
        if index != view.slot and other.kind == slot.kind and other.rows >= view.stop:
            yield View(index, view.start, view.stop)


def _slot_faults(plan: AttentionPlan, rank: int, rank_plan: RankPlan) -> Iterator[Mutant]:
    """Two slots of one kind become one: a buffer is reused while it is in use."""
    for a, first in enumerate(rank_plan.slots):
        for b, second in enumerate(rank_plan.slots):
            if a < b and first.kind == second.kind and second.pin is None and first.rows >= second.rows:
                changed = _map_views(rank_plan, lambda v, a=a, b=b: View(a, v.start, v.stop) if v.slot == b else v)
                yield Mutant(
                    f"slots merged: rank {rank}, {a} and {b}", replace(plan, ranks={**plan.ranks, rank: changed})
                )


def _map_views(plan: RankPlan, change: Callable[[View], View]) -> RankPlan:
    def op(o: LocalOp) -> LocalOp:
        return LocalOp(o.op, change(o.dst), change(o.src) if o.src else None)

    def tile(t: Tile) -> Tile:
        return replace(t, q=change(t.q), kv=change(t.kv), acc=change(t.acc), acc_kv=t.acc_kv and change(t.acc_kv))

    steps = tuple(
        replace(
            s,
            pre=tuple(map(op, s.pre)),
            post=tuple(replace(t, view=change(t.view)) for t in s.post),
            tiles=tuple(map(tile, s.tiles)),
            after=tuple(map(op, s.after)),
        )
        for s in plan.steps
    )
    return replace(plan, steps=steps)


def _message_faults(plan: AttentionPlan) -> Iterator[Mutant]:
    numbers = sorted({t.message for rank_plan in plan.ranks.values() for t in rank_plan.transfers()})
    for number in numbers:
        yield Mutant(f"message dropped: {number}", _edit(plan, number, drop=True))
        yield Mutant(f"message waits a step later: {number}", _edit(plan, number, wait_shift=1))
        yield Mutant(f"message is posted a step later: {number}", _edit(plan, number, post_shift=1))
        yield Mutant(f"message is posted a step earlier: {number}", _edit(plan, number, post_shift=-1))
        for end in ("send", "recv"):
            for shift in (-1, 1):
                yield Mutant(f"{end} moved by a row: {number}", _edit(plan, number, end=end, row_shift=shift))


def _edit(
    plan: AttentionPlan,
    number: int,
    *,
    drop: bool = False,
    wait_shift: int = 0,
    post_shift: int = 0,
    end: str = "",
    row_shift: int = 0,
) -> AttentionPlan:
    ranks = {}
    last = max(step.index for rank_plan in plan.ranks.values() for step in rank_plan.steps)
    for rank, rank_plan in plan.ranks.items():
        by_index = {step.index: step for step in rank_plan.steps}
        posts = {i: [t for t in s.post if t.message == number] for i, s in by_index.items()}
        posted = next((i for i, found in posts.items() if found), None)
        if posted is None:
            ranks[rank] = rank_plan
            continue
        transfer = posts[posted][0]
        waited = next(i for i, s in by_index.items() if number in s.wait)
        cleaned = {
            i: replace(
                s,
                post=tuple(t for t in s.post if t.message != number),
                wait=tuple(m for m in s.wait if m != number),
            )
            for i, s in by_index.items()
        }
        if not drop:
            _place(
                cleaned, _shifted(transfer, end, row_shift), max(0, posted + post_shift), min(last, waited + wait_shift)
            )
        ranks[rank] = replace(rank_plan, steps=tuple(cleaned[i] for i in sorted(cleaned)))
    return replace(plan, ranks=ranks)


def _shifted(transfer: Transfer, end: str, rows: int) -> Transfer:
    if transfer.op != end:
        return transfer
    view = transfer.view
    return replace(transfer, view=View(view.slot, max(0, view.start + rows), max(1, view.stop + rows)))


def _place(steps: dict[int, Step], transfer: Transfer, post: int, wait: int) -> None:
    for index in (post, wait):
        steps.setdefault(index, Step(index))
    steps[post] = replace(steps[post], post=(*steps[post].post, transfer))
    steps[wait] = replace(steps[wait], wait=(*steps[wait].wait, transfer.message))
