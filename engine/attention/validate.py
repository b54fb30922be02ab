"""Structural rules of an attention plan; `check_plan` names every one that is broken.

V1  every transfer is posted once and waited for once         V5  nothing touches rows that are in flight (reading what
V2  a wait comes at or after its post                              is being sent is allowed)
V3  waits of one channel come in post order                   V6  no row is read before something wrote it
V4  every view lies inside its slot                           V7  sends and receives match one to one
                                                              V8  both ends agree on steps, rows, kind and channel
                                                              V9  rows that were kept are not written
Values are proven by counting, in the tests; these rules say where a broken plan breaks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.plan import AttentionPlan, Direction, LocalOp, RankPlan, Tile, Transfer, View
from engine.errors import PlanError

# Pinned slots that the caller fills before the run.
INPUT_PINS = frozenset({"q", "kv", "qx", "dout"})
SAVED_PINS = frozenset({"ring_kv", "kv_last", "saved"})  # forward writes them, backward finds them filled


@dataclass(frozen=True)
class _Flight:
    transfer: Transfer
    post: int
    wait: int


def check_plan(plan: AttentionPlan, recomputed_rows: Mapping[int, int] | None = None) -> None:
    """Raise PlanError with all violations. V7 and V8 need all ranks and are skipped for a plan of some.

    recomputed_rows   of a recompute plan, by rank: the rows of `saved` from here on were filled before the run
    """
    problems: list[str] = []
    flights = {}
    for rank, rank_plan in plan.ranks.items():
        found = [*_check_views(rank_plan)]
        flights[rank], unpaired = _flights(rank_plan)
        found += unpaired
        if not found:  # the remaining rules need sound views and pairs
            found += [*_check_order(flights[rank]), *_check_conflicts(rank_plan, flights[rank])]
            kept_from = None if recomputed_rows is None else recomputed_rows[rank]
            found += _check_written(rank_plan, _given_rows(rank_plan, plan.direction, kept_from))
            found += _check_kept(rank_plan, kept_from)
        problems += [f"rank {rank}: {text}" for text in found]
    if len(plan.ranks) == plan.size:
        problems += _check_ends(plan, flights)
    if problems:
        raise PlanError(f"{plan.direction} plan of {plan.size} ranks:\n" + "\n".join(problems))


def _tile_views(tile: Tile) -> list[View]:
    return [view for view in (tile.q, tile.kv, tile.acc, tile.acc_kv) if view is not None]


def _read_by(tile: Tile) -> list[View]:
    """What a tile reads: sums that it stores hold nothing yet."""
    stored = [view for view, stores in ((tile.acc, tile.stores), (tile.acc_kv, tile.stores_kv)) if stores]
    return [view for view in _tile_views(tile) if view not in stored]


def _transfer_views(transfer: Transfer) -> list[View]:
    return [transfer.view] if transfer.source is None else [transfer.view, transfer.source]


def _op_views(op: LocalOp) -> list[View]:
    return [op.dst] if op.src is None else [op.dst, op.src]


def _check_views(plan: RankPlan) -> Iterator[str]:
    for step in plan.steps:
        views = [view for tile in step.tiles for view in _tile_views(tile)]
        views += [view for op in (*step.pre, *step.after) for view in _op_views(op)]
        views += [view for transfer in step.post for view in _transfer_views(transfer)]
        for view in views:
            if not (0 <= view.slot < len(plan.slots) and 0 <= view.start < view.stop <= plan.slots[view.slot].rows):
                yield f"V4 step {step.index}: {view} lies outside its slot"
        for op in (*step.pre, *step.after):
            if op.src is not None and op.src.stop - op.src.start != op.dst.stop - op.dst.start:
                yield f"V4 step {step.index}: {op} has operands of different length"


def _flights(plan: RankPlan) -> tuple[list[_Flight], list[str]]:
    posted: dict[int, tuple[Transfer, int]] = {}
    flights, problems = [], []
    for step in plan.steps:
        for transfer in step.post:
            if transfer.message in posted:
                problems.append(f"V1 step {step.index}: message {transfer.message} is posted twice")
            posted[transfer.message] = (transfer, step.index)
        for message in step.wait:
            if message not in posted:
                problems.append(f"V2 step {step.index}: waits for message {message}, which was not posted before")
                continue
            flights.append(_Flight(posted[message][0], posted[message][1], step.index))
    waited = [flight.transfer.message for flight in flights]
    counts = {message: waited.count(message) for message in posted}
    problems += [f"V1: message {m} is waited for {count} times" for m, count in counts.items() if count != 1]
    return flights, problems


def _check_order(flights: list[_Flight]) -> Iterator[str]:
    by_channel = defaultdict(list)
    for flight in flights:
        by_channel[flight.transfer.channel].append(flight)
    for channel, channel_flights in by_channel.items():
        ordered = sorted(channel_flights, key=lambda f: (f.post, f.wait))
        for before, after in itertools.pairwise(ordered):
            if before.post < after.post and before.wait > after.wait:
                numbers = f"{before.transfer.message} and {after.transfer.message}"
                yield f"V3 channel {channel}: messages {numbers} are waited for out of post order"


def _accesses(plan: RankPlan) -> Iterator[tuple[int, View, bool]]:
    """(time, view, writes) of every local access."""
    for step in plan.steps:
        time = 5 * step.index
        for op, at in [(op, time) for op in step.pre] + [(op, time + 4) for op in step.after]:
            yield at, op.dst, True
            if op.src is not None:
                yield at, op.src, False
        for tile in step.tiles:
            yield time + 2, tile.q, False
            yield time + 2, tile.kv, False
            yield time + 2, tile.acc, True
            if tile.acc_kv is not None:
                yield time + 2, tile.acc_kv, True


def _check_conflicts(plan: RankPlan, flights: list[_Flight]) -> Iterator[str]:
    accesses = list(_accesses(plan))
    for flight in flights:
        start, stop = 5 * flight.post + 1, 5 * flight.wait + 3
        for held, fills in _held_rows(flight.transfer):
            for time, view, writes in accesses:
                if start <= time <= stop and (writes or fills) and view.overlaps(held):
                    yield f"V5 step {time // 5}: {view} is touched while message {flight.transfer.message} is in flight"
    for first, second in itertools.combinations(flights, 2):
        if first.wait < second.post or second.wait < first.post:
            continue
        pairs = itertools.product(_held_rows(first.transfer), _held_rows(second.transfer))
        if any((fills or also) and held.overlaps(other) for (held, fills), (other, also) in pairs):
            yield f"V5: messages {first.transfer.message} and {second.transfer.message} share rows in flight"


def _held_rows(transfer: Transfer) -> list[tuple[View, bool]]:
    """(rows, whether they are written) that a transfer holds while it is in flight."""
    if transfer.source is not None:
        return [(transfer.source, False), (transfer.view, True)]
    return [(transfer.view, transfer.op == "recv")]


def _given_rows(plan: RankPlan, direction: Direction, kept_from: int | None) -> list[npt.NDArray[np.bool_]]:
    """By slot: which rows the caller filled."""
    given = INPUT_PINS | SAVED_PINS if direction == "backward" else INPUT_PINS
    rows = [np.full(slot.rows, slot.pin in given) for slot in plan.slots]
    if kept_from is not None and "saved" in plan.pins:
        rows[plan.pinned("saved")][kept_from:] = True
    return rows


def _check_kept(plan: RankPlan, kept_from: int | None) -> Iterator[str]:
    if kept_from is None or "saved" not in plan.pins:
        return
    saved = plan.pinned("saved")
    kept = View(saved, kept_from, plan.slots[saved].rows)
    writes = [(time // 5, view) for time, view, written in _accesses(plan) if written]
    writes += [(step.index, t.view) for step in plan.steps for t in step.post if t.op != "send"]
    for step, view in writes:
        if view.overlaps(kept):
            yield f"V9 step {step}: {view} is written, but its rows from {kept_from} on were kept"


def _check_written(plan: RankPlan, written: list[npt.NDArray[np.bool_]]) -> list[str]:
    arriving: dict[int, View] = {}
    problems: list[str] = []

    def read(views: Iterable[View], what: object, step: int) -> None:
        unwritten = [v for v in views if not written[v.slot][v.start : v.stop].all()]
        problems.extend(f"V6 step {step}: {what} reads rows of {view} that nothing wrote" for view in unwritten)

    for step in plan.steps:
        for op in step.pre:
            _apply(op, written, read, step.index)
        for transfer in step.post:
            if transfer.op == "send" or transfer.source is not None:
                read([transfer.source or transfer.view], transfer, step.index)
            if transfer.op != "send":
                arriving[transfer.message] = transfer.view
                written[transfer.view.slot][transfer.view.start : transfer.view.stop] = False
        for tile in step.tiles:
            read(_read_by(tile), tile, step.index)
            for view in (tile.acc, tile.acc_kv):
                if view is not None:
                    written[view.slot][view.start : view.stop] = True
        for message in step.wait:
            if message in arriving:
                view = arriving[message]
                written[view.slot][view.start : view.stop] = True
        for op in step.after:
            _apply(op, written, read, step.index)
    return problems


def _apply(op: LocalOp, written: list[npt.NDArray[np.bool_]], read: object, step: int) -> None:
    sources = [op.src] if op.src is not None else []
    if op.op == "add":
        sources.append(op.dst)
    read(sources, op, step)  # type: ignore[operator]
    written[op.dst.slot][op.dst.start : op.dst.stop] = True


def _check_ends(plan: AttentionPlan, flights: dict[int, list[_Flight]]) -> list[str]:
    ends: defaultdict[int, list[tuple[int, _Flight]]] = defaultdict(list)
    for rank, rank_flights in flights.items():
        for flight in rank_flights:
            ends[flight.transfer.message].append((rank, flight))
    problems: list[str] = []
    for message, both in ends.items():
        if [flight.transfer.op for _, flight in both] in (["load"], ["store"]):
            problems += _check_copy(plan.ranks[both[0][0]], both[0][1].transfer)
            continue
        if sorted(flight.transfer.op for _, flight in both) != ["recv", "send"]:
            problems.append(f"V7 message {message} has ends {[(r, f.transfer.op) for r, f in both]}")
            continue
        (a, first), (b, second) = both
        if _signature(plan, a, first) != _signature(plan, b, second) or (first.transfer.peer, second.transfer.peer) != (
            b,
            a,
        ):
            problems.append(f"V8 message {message}: ranks {a} and {b} disagree: {first} / {second}")
    return problems


def _check_copy(plan: RankPlan, transfer: Transfer) -> Iterator[str]:
    """V8 of a load or store: host to device or back, equal rows and kind."""
    assert transfer.source is not None
    source, target = plan.slots[transfer.source.slot], plan.slots[transfer.view.slot]
    expected = ("host", "device") if transfer.op == "load" else ("device", "host")
    rows = transfer.view.stop - transfer.view.start, transfer.source.stop - transfer.source.start
    if (source.where, target.where) != expected or rows[0] != rows[1]:
        yield f"V8 message {transfer.message}: {transfer} moves {rows[1]} rows from {source} into {rows[0]} of {target}"
    elif (source.kind, source.heads) != (target.kind, target.heads):
        yield f"V8 message {transfer.message}: {transfer} moves {source} into {target}"


def _signature(plan: AttentionPlan, rank: int, flight: _Flight) -> tuple[object, ...]:
    view = flight.transfer.view
    slot = plan.ranks[rank].slots[view.slot]
    return flight.post, flight.wait, flight.transfer.channel, view.stop - view.start, slot.kind, slot.heads
