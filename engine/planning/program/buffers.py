"""From values that are written once to buffers.

Programs name every intermediate once (a *value*) and never rotate a buffer by hand. The allocator maps values of one
kind to slots by linear scan over the time 5*step + phase (pre 0, post 1, tiles 2, wait 3, after 4); a transfer
occupies its rows from post to wait. A slot passes to a value whose first use is strictly later than the last use of
the old one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from engine.config.settings import Store
from engine.planning.program.ops import (
    ALL_HEADS,
    HeadPart,
    Kind,
    LocalOp,
    RankPlan,
    Slot,
    Step,
    Tile,
    Transfer,
    View,
)

PHASES = 5  # of a step


class Rows(NamedTuple):
    """Rows [start, stop) of a block."""

    start: int
    stop: int


class Home(NamedTuple):
    """Kind, heads and memory of values that may share a buffer."""

    kind: Kind
    heads: HeadPart = ALL_HEADS
    where: Store = "device"


class Value(NamedTuple):
    """Rows of one rank's block, held by `rank`, written once; `number` identifies it on that rank."""

    number: int
    rank: int
    home: Home
    rows: Rows
    pin: str | None = None

    @property
    def kind(self) -> Kind:
        """What its rows hold."""
        return self.home.kind

    def view(self, rows: Rows) -> View:
        """View of some rows of the block; slot numbers are value numbers until allocation."""
        assert self.rows.start <= rows.start <= rows.stop <= self.rows.stop, (self, rows)
        return View(self.number, rows.start - self.rows.start, rows.stop - self.rows.start)


def slot_of_value(value: Value) -> Slot:
    kind, heads, where = value.home
    return Slot(kind, value.rows.stop - value.rows.start, value.pin, heads, where)


def allocate(rank: int, values: list[Value], steps: tuple[Step, ...]) -> RankPlan:
    spans = _lifetimes(steps)
    slots: list[Slot] = []
    free_after: list[int | None] = []  # last use of each slot; None: never reused
    alike: defaultdict[Home, list[int]] = defaultdict(list)  # slots
    slot_of: dict[int, int] = {}
    order = sorted((v for v in values if v.pin or v.number in spans), key=lambda v: spans.get(v.number, (-1, -1))[0])
    for value in order:
        rows = value.rows.stop - value.rows.start
        chosen = None if value.pin else _free_slot(alike[value.home], free_after, spans[value.number][0])
        if chosen is None:
            chosen = len(slots)
            slots.append(slot_of_value(value))
            free_after.append(None)
            alike[value.home].append(chosen)
        if slots[chosen].rows < rows:
            slots[chosen] = replace(slots[chosen], rows=rows)
        free_after[chosen] = None if value.pin else spans[value.number][1]
        slot_of[value.number] = chosen
    return RankPlan(rank, tuple(slots), tuple(_renumbered(step, slot_of) for step in steps))


def _free_slot(alike: list[int], free_after: list[int | None], start: int) -> int | None:
    for index in alike:
        last = free_after[index]
        if last is not None and last < start:
            return index
    return None


def _lifetimes(steps: tuple[Step, ...]) -> dict[int, tuple[int, int]]:
    """First and last time at which each value is touched."""
    spans: dict[int, tuple[int, int]] = {}
    in_flight: dict[int, Transfer] = {}
    for step in steps:
        in_flight.update((transfer.message, transfer) for transfer in step.post)
        waited = [in_flight.pop(message) for message in step.wait]
        for phase, items in enumerate((step.pre, step.post, step.tiles, waited, step.after)):
            time = PHASES * step.index + phase
            for view in itertools.chain.from_iterable(items):
                if isinstance(view, View):
                    spans[view.slot] = spans.get(view.slot, (time, time))[0], time
    return spans


_Item = TypeVar("_Item", LocalOp, Transfer, Tile)


def _renumbered(step: Step, slot_of: dict[int, int]) -> Step:
    def renumbered(x: Any) -> Any:
        return View(slot_of[x.slot], x.start, x.stop) if isinstance(x, View) else x

    def moved(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
        return tuple(type(item)(*map(renumbered, item)) for item in items)

    return Step(step.index, moved(step.pre), moved(step.post), moved(step.tiles), step.wait, moved(step.after))
