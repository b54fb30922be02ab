"""Which rank makes all others wait, when a run makes no progress: from what the ranks still say. Pure.

`find_culprit` goes through the rules from the surest to the weakest:

    1. a process that is gone
    2. a process that is stopped
    3. a process in uninterruptible input or output, while others are not
    4. collectives (flight recorder): the rank that others wait for and that waits for nobody; a rank that entered
       another operation than the rest; ranks that wait for each other
    5. step and phase: the rank that is behind all others
    6. stacks: the only rank that is not inside a collective
    7. everybody waits: perhaps the network

The victim is never named for waiting: the ranks that complain loudest are those that wait for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.hang_flight import Edge, Flight, find_mismatch, read_flight, sinks, wait_edges
from cluster.hang_stacks import ThreadStack, main_thread, parse_stacks, waits_in
from cluster.remote_text import one_line
from cluster.values import integer

GONE = "gone"
MAX_LINES = 8
MAX_NAMED = 8
# In the order in which a step goes through them; those of equal rank do not say who is behind.
_PHASES = {
    "import torch": 0,
    "start": 1,
    "prepare data": 2,
    "build model": 3,
    "measure peak": 4,
    "restore": 5,
    "first weights": 5,
    "load batch": 6,
    "count labels": 7,
    "forward": 8,
    "loss": 9,
    "backward": 10,
    "optimizer": 11,
    "train": 12,
    "evaluate": 12,
}


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank of a run that hangs.

    process_state: letter of /proc/PID/stat, "gone", or None where its node gave no answer. status: content of
    rank<NNNN>.status.json. stacks: text of rank<NNNN>.stacks, of which the last dump counts, or None when the rank did
    not answer. flight: content of rank<NNNN>.flight.json if it answers this request, else None.
    """

    rank: int
    host: str
    process_state: str | None
    status: Mapping[str, Any] | None = None
    stacks: str | None = None
    flight: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Culprit:
    """Who makes the others wait, why that is believed, and the lines of the stack that show it.

    Where `certain` is False the sentence is a guess that a person should check.
    """

    ranks: tuple[int, ...]
    reason: str
    lines: tuple[str, ...]
    certain: bool


@dataclass(frozen=True)
class _Rank:
    """Evidence of one rank, read."""

    evidence: RankEvidence
    threads: tuple[ThreadStack, ...]
    flight: Flight | None
    waits: bool | None  # by its stacks; None: they say nothing

    @property
    def number(self) -> int:
        return self.evidence.rank

    @property
    def name(self) -> str:
        return f"rank {self.number} on {one_line(self.evidence.host)}"

    @property
    def answers(self) -> bool:
        return self.flight is not None

    @property
    def place(self) -> str:
        """What it is doing, from its stack and its status, which may be old where nothing else answers."""
        main, status = main_thread(self.threads), self.evidence.status or {}
        parts = [f"it is in {main.frames[0]}"] if main is not None and main.frames else []
        if integer(status, "step") is not None:
            parts.append(f"{'' if self.answers else 'last seen at '}step {status['step']}")
        if isinstance(status.get("phase"), str):
            parts.append(f"phase {one_line(status['phase'], 40)}")
        return ", ".join(parts)

    @property
    def lines(self) -> tuple[str, ...]:
        main = main_thread(self.threads)
        return () if main is None else tuple(str(frame) for frame in main.frames[:MAX_LINES])


def find_culprit(evidence: Sequence[RankEvidence]) -> Culprit | None:
    """Who makes the others wait, or None when nothing points to anybody and nobody waits."""
    ranks = [_read(one) for one in sorted(evidence, key=lambda one: one.rank)]
    rules = (_by_process, _by_collectives, _by_progress, _by_stacks, _all_wait)
    return next((found for rule in rules if (found := rule(ranks)) is not None), None)


def _read(evidence: RankEvidence) -> _Rank:
    threads = parse_stacks(evidence.stacks) if evidence.stacks else ()
    waits = waits_in(threads) is not None if main_thread(threads) is not None else None
    return _Rank(evidence, threads, read_flight(evidence.rank, evidence.flight), waits)


def _by_process(ranks: Sequence[_Rank]) -> Culprit | None:
    """A process that is gone or stopped, or cannot be woken while others can."""
    for letters, what in (
        ((GONE, "Z", "X"), "its process is gone"),
        (("T", "t"), "its process is stopped, by SIGSTOP or a debugger"),
        (("D",), "its process is in uninterruptible input or output: a disk or network file system does not answer"),
    ):
        found = [rank for rank in ranks if rank.evidence.process_state in letters]
        if letters == ("D",):  # for a moment, everybody is now and then
            found = [rank for rank in found if rank.waits is not True]
        if found and (letters != ("D",) or len(found) < len(ranks)):
            return _culprit(found, f"{_names(found)}: {what}", certain=True)
    return None


def _by_collectives(ranks: Sequence[_Rank]) -> Culprit | None:
    """Who is awaited and waits for nobody, by flight records."""
    flights = {rank.number: rank.flight for rank in ranks if rank.flight is not None}
    if not flights:
        return None
    if (mismatch := find_mismatch(flights)) is not None:
        odd = [rank for rank in ranks if rank.number in mismatch.ranks]
        text = f"{_names(odd)} entered {mismatch.own} where the others entered {mismatch.others.op}"
        if mismatch.own.op == mismatch.others.op:
            text = f"{_names(odd)} entered {mismatch.own} with sizes {mismatch.own.sizes}, the others with "
            text += one_line(mismatch.others.sizes)
        return _culprit(odd, text, certain=mismatch.is_minority)
    edges = wait_edges(flights, [rank.number for rank in ranks])
    if awaited := sinks(edges):
        return _awaited([rank for rank in ranks if rank.number in awaited], edges)
    return _of_circle(ranks, edges)


def _awaited(found: Sequence[_Rank], edges: Sequence[Edge]) -> Culprit:
    """The ranks that others wait for, and what these miss."""
    numbers = {rank.number for rank in found}
    missing = [edge for edge in edges if edge.awaited in numbers]
    waiters = sorted({edge.waiter for edge in missing})
    edge = next((edge for edge in missing if edge.collective is not None), missing[0])
    wait = f"{_numbers(waiters)} wait{_s(len(waiters))}"
    silent = [rank for rank in found if not rank.answers]
    if not silent:
        text = f"{_names(found)} {edge.undone}, for which {wait}"
        return _culprit(found, _with_place(text, found), certain=True)
    has_stacks = all(rank.threads for rank in silent)
    how = "answers signals only: something holds its interpreter" if has_stacks else "gives no answer"
    text = f"{_names(silent)} {how}, while {wait} in {edge.waits_in}"
    return _culprit(silent, _with_place(text, silent), certain=has_stacks)


def _of_circle(ranks: Sequence[_Rank], edges: Sequence[Edge]) -> Culprit | None:
    """Ranks that wait for each other: the one whose stack says that it does not wait after all, else all of them.

    A collective may have been started ahead of time, by a rank that then went on and hangs elsewhere. A circle of
    messages alone is the ring of an attention, which stands still as a whole when one link does.
    """
    busy = {rank.number for rank in ranks if rank.waits is False}
    if busy:
        edges = [edge for edge in edges if edge.waiter not in busy]
        found = [rank for rank in ranks if rank.number in busy and rank.number in sinks(edges)]
        return _awaited(found, edges) if found else None
    circle = [rank for rank in ranks if rank.number in {edge.waiter for edge in edges}]
    if all(edge.collective is None for edge in edges):
        return None
    described = "; ".join(f"rank {edge.waiter} waits in {edge.waits_in}" for edge in _one_each(edges)[:MAX_NAMED])
    return _culprit(circle, f"{_names(circle)} wait for each other: {described}", certain=False)


def _one_each(edges: Sequence[Edge]) -> list[Edge]:
    """The first edge of every rank that waits."""
    return list({edge.waiter: edge for edge in reversed(edges)}.values())[::-1]


def _by_progress(ranks: Sequence[_Rank]) -> Culprit | None:
    """The rank that is behind all others in step or phase."""
    places = {rank.number: _progress(rank.evidence.status) for rank in ranks}
    known = {number: place for number, place in places.items() if place is not None}
    if len(known) < 2 or len(known) < len(ranks):
        return None
    first = min(known.values())
    behind = [rank for rank in ranks if known[rank.number] == first]
    if len(behind) != 1 or behind[0].waits is True:
        return None
    others = min(place for place in known.values() if place != first)
    what = (
        f"is at step {first[0]}, the others at {others[0]}" if first[0] != others[0] else "is behind in the same step"
    )
    return _culprit(behind, _with_place(f"{behind[0].name} {what}", behind), certain=behind[0].waits is False)


def _by_stacks(ranks: Sequence[_Rank]) -> Culprit | None:
    """The ranks whose main thread is in no collective, while others are in one."""
    busy = [rank for rank in ranks if rank.waits is False]
    waiting = [rank for rank in ranks if rank.waits is True]
    if busy and waiting:
        text = f"{_names(busy)} {_is(busy)} in no collective, while {_numbers([rank.number for rank in waiting])} wait"
        text += _s(len(waiting))
        return _culprit(busy, _with_place(text, busy), certain=len(busy) == 1 and len(waiting) == len(ranks) - 1)
    silent = [rank for rank in ranks if rank.waits is None]
    if silent and waiting:
        text = f"{_names(silent)} gave no stacks, while {_numbers([rank.number for rank in waiting])} wait"
        return _culprit(silent, text + _s(len(waiting)), certain=False)
    return None


def _all_wait(ranks: Sequence[_Rank]) -> Culprit | None:
    """Nobody in particular: every rank waits, as when messages are lost on their way."""
    if not ranks or any(rank.waits is not True for rank in ranks):
        return None
    calls = sorted({call for rank in ranks if (call := waits_in(rank.threads)) is not None})
    hosts = list(dict.fromkeys(one_line(rank.evidence.host) for rank in ranks))
    network = f"is the network between {_join(hosts)} all right?" if len(hosts) > 1 else "no rank is behind the others"
    return _culprit(ranks, f"every rank waits in {_join(calls)}; {network}", certain=False)


def _culprit(found: Sequence[_Rank], reason: str, *, certain: bool) -> Culprit:
    return Culprit(tuple(rank.number for rank in found), one_line(reason, 600), found[0].lines, certain)


def _progress(status: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
    """(step, micro-step, phase) as numbers that grow; None where a part is missing or unknown."""
    if status is None or status.get("phase") not in _PHASES:
        return None
    phase = _PHASES[status["phase"]]
    micro_step = integer(status, "micro_step") or 0
    if phase > _PHASES["backward"]:
        micro_step = 2**31  # after all of them
    return integer(status, "step") or 0, micro_step, phase


def _with_place(text: str, found: Sequence[_Rank]) -> str:
    place = found[0].place
    return f"{text}; {place}" if place else text


def _names(ranks: Sequence[_Rank]) -> str:
    if len(ranks) == 1:
        return ranks[0].name
    hosts = list(dict.fromkeys(one_line(rank.evidence.host) for rank in ranks))
    return f"{_numbers([rank.number for rank in ranks])} on {_join(hosts)}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_join([str(rank) for rank in ranks])}"


def _join(words: Sequence[str]) -> str:
    if len(words) > MAX_NAMED:
        words = [*words[: MAX_NAMED - 1], f"{len(words) - MAX_NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"


def _s(count: int) -> str:
    return "s" if count == 1 else ""


def _is(ranks: Sequence[_Rank]) -> str:
    return "is" if len(ranks) == 1 else "are"
