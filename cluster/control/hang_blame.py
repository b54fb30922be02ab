"""Who holds up a run that hangs, from what its ranks left: states of processes, flight records, stacks of threads.

Pure; what a rank sends is checked, never trusted, and may be cut anywhere. `find_culprit` goes through the rules from
the surest to the weakest:

    1. a process that is gone, stopped, or in uninterruptible input or output while others are not
    2. a rank that entered another collective than the rest as the same number of a group
    3. the rank that others wait for and that waits for nobody. In a group all ranks enter the same collectives in the
       same order: who has entered number 57 and is not through waits for those that have entered 56 at most; a message
       waits for its peer. Or ranks that wait for each other
    4. step and phase: the rank that is behind all others
    5. the only rank whose stack is not inside a collective
    6. everybody waits: perhaps the network

The victim is never named for waiting: the ranks that complain loudest are those that wait for another one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.remote_text import integer, one_line, table, word

MAX_LINES = 8
MAX_NAMED = 8
MAX_ENTRIES = 1000
MAX_TEXT = 1_000_000
_STATES = {
    ("gone", "Z", "X"): "its process is gone",
    ("T", "t"): "its process is stopped, by SIGSTOP or a debugger",
    ("D",): "its process is in uninterruptible input or output: a disk or network file system does not answer",
}
# In the order in which a step goes through them. Training goes on after an evaluation: neither of the two is behind.
_SAME_PHASE = {"evaluate": "train", "first weights": "restore"}
_PHASES = (
    *("import torch", "start", "prepare data", "build model", "measure peak", "restore", "load batch"),
    *("count labels", "forward", "loss", "backward", "optimizer", "train"),
)
_SAME_SIZES = ("all_reduce", "allreduce", "reduce_scatter", "all_gather", "allgather")


class Collective(NamedTuple):
    """One collective as one rank entered it.

    key: backend and group, whose collectives are numbered together. what: that which all ranks must have alike, the
    operation and its sizes, which are empty where those of ranks may differ.
    """

    key: tuple[str, str]
    seq: int
    what: tuple[str, str]
    is_done: bool
    group: str

    def __str__(self) -> str:
        return one_line(f"{self.what[0]} number {self.seq} of group {self.group}")


class Flight:
    """The flight record of a rank. newest: its last collective in every group; peer: whose message it waits for."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        entries = document["entries"][-MAX_ENTRIES:]
        self.collectives = [found for entry in entries if (found := _read_entry(entry)) is not None]
        self.newest = {one.key: one for one in sorted(self.collectives, key=lambda one: one.seq)}
        self.groups = {
            str(name): tuple(rank for rank in members if isinstance(rank, int))
            for name, members in table(document, "groups").items()
            if isinstance(members, list)
        }
        waiting = document.get("waiting")
        self.peer, self.is_sending = integer(waiting, "peer"), word(waiting, "what") == "send"


def _read_entry(entry: Any) -> Collective | None:
    seq = integer(entry, "seq")
    if seq is None or entry.get("p2p"):
        return None
    backend, _, op = str(entry.get("op", ""))[:200].rpartition(":")
    name, described = (str(entry.get(field, ""))[:200] for field in ("group", "desc"))
    sizes = str(entry.get("sizes"))[:500] if any(same in op for same in _SAME_SIZES) else ""
    group = described if described not in ("", "undefined") else name
    return Collective((backend, name), seq, (op, sizes), entry.get("state") == "completed", group)


_PACKAGE = re.compile(r".+/(?=(?:torch|engine|burst_cli|cluster)/)")


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        path = _PACKAGE.sub("", self.file)
        short = path if path != self.file else "/".join(path.split("/")[-3:])
        return one_line(f"{self.function} ({short}:{self.line})")


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

    @functools.cached_property
    def threads(self) -> list[list[Frame]]:
        """What `stacks` says: see `parse_stacks`."""
        return parse_stacks(self.stacks or "")

    @functools.cached_property
    def recorded(self) -> Flight | None:
        """What `flight` says."""
        return Flight(self.flight) if self.flight is not None and isinstance(self.flight.get("entries"), list) else None

    @property
    def waits(self) -> bool | None:
        """Whether it waits for others, by its stacks; None: they say nothing."""
        return waits_in(self.threads) is not None if self.threads else None

    @property
    def frames(self) -> list[Frame]:
        """Where its program is."""
        return self.threads[0] if self.threads else []

    @property
    def place(self) -> str:
        """What it is doing, from its stack and its status, which may be old where nothing else answers."""
        step, phase = integer(self.status, "step"), word(self.status, "phase", 40)
        parts = [f"it is in {self.frames[0]}"] if self.frames else []
        if step is not None:
            parts.append(f"{'' if self.recorded else 'last seen at '}step {step}")
        return ", ".join([*parts, *([f"phase {phase}"] if phase else [])])


@dataclass(frozen=True)
class Culprit:
    """Who makes the others wait, why that is believed, and the lines of the stack that show it.

    Where `certain` is False the sentence is a guess that a person should check.
    """

    ranks: tuple[int, ...]
    reason: str
    lines: tuple[str, ...]
    certain: bool


def find_culprit(evidence: Sequence[RankEvidence]) -> Culprit | None:
    """Who makes the others wait, or None when nothing points to anybody and nobody waits."""
    ranks = sorted(evidence, key=lambda one: one.rank)
    rules = (_by_process, _by_operation, _by_waits, _by_progress, _by_stacks, _all_wait)
    return next((found for rule in rules if (found := rule(ranks)) is not None), None)


def _by_process(ranks: Sequence[RankEvidence]) -> Culprit | None:
    for letters, what in _STATES.items():
        # For a moment, everybody is in input or output now and then.
        found = [rank for rank in ranks if rank.process_state in letters and not ("D" in letters and rank.waits)]
        if found and ("D" not in letters or len(found) < len(ranks)):
            return _culprit(found, f"{_names(found)}: {what}", certain=True)
    return None


def _by_operation(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """By the earliest collective that some ranks entered as another operation, or with other sizes, than the rest."""
    places: dict[tuple[int, tuple[str, str], tuple[int, ...]], dict[int, Collective]] = {}
    for rank, flight in _flights(ranks).items():
        for one in flight.collectives:
            places.setdefault((one.seq, one.key, flight.groups.get(one.key[1], ())), {})[rank] = one
    for _, entered in sorted(places.items()):
        counts = Counter(one.what for one in entered.values()).most_common(2)
        if len(counts) < 2 or all(one.is_done for one in entered.values()):
            continue
        ((op, sizes), most), (_, second) = counts
        odd = [rank for rank in ranks if rank.rank in entered and entered[rank.rank].what != (op, sizes)]
        own = entered[odd[0].rank]
        text = f"{_names(odd)} entered {own} where the others entered {op}"
        if own.what[0] == op:
            text = f"{_names(odd)} entered {own} with sizes {own.what[1]}, the others with {one_line(sizes)}"
        return _culprit(odd, text, certain=most > second)
    return None


def _flights(ranks: Sequence[RankEvidence]) -> dict[int, Flight]:
    return {rank.rank: rank.recorded for rank in ranks if rank.recorded is not None}


class Wait(NamedTuple):
    """Rank `waiter` waits for rank `awaited`. is_sure: the other one agrees. place: where; undone: what is missing."""

    waiter: int
    awaited: int
    is_sure: bool
    is_message: bool
    place: str
    undone: str


def _waits_of(ranks: Sequence[RankEvidence]) -> Iterator[Wait]:
    """Who waits for whom; one without a record is awaited, unsurely, by all it shares a group with."""
    numbers, flights = [rank.rank for rank in ranks], _flights(ranks)
    for rank, flight in flights.items():
        if (peer := flight.peer) is not None and peer in numbers and peer != rank:
            way, undone = ("to", "taken") if flight.is_sending else ("from", "sent")
            yield Wait(rank, peer, peer in flights, True, f"a message {way} rank {peer}", f"has not {undone} a message")
        for key, one in flight.newest.items():
            members = () if one.is_done else flight.groups.get(key[1], numbers)
            for member in members:
                other = flights.get(member)
                is_there = other is not None and key in other.newest and other.newest[key].seq >= one.seq
                if member in numbers and member != rank and not is_there:
                    yield Wait(rank, member, other is not None, False, str(one), f"has not entered {one}")


def _by_waits(ranks: Sequence[RankEvidence]) -> Culprit | None:
    waits = list(_waits_of(ranks))
    found = _awaited(ranks, waits)
    if not found:
        # A collective may have been started ahead of time, by a rank that then went on and hangs elsewhere.
        busy = {rank.rank for rank in ranks if rank.waits is False}
        if not busy:
            return _circle(ranks, waits)
        waits = [wait for wait in waits if wait.waiter not in busy]
        found = [rank for rank in _awaited(ranks, waits) if rank.rank in busy]
        if not found:
            return None
    missing = [wait for wait in waits if wait.awaited in {rank.rank for rank in found}]
    who, first = _wait(sorted({wait.waiter for wait in missing})), min(missing, key=lambda wait: wait.is_message)
    silent = [rank for rank in found if rank.recorded is None]
    if not silent:
        text = f"{_names(found)} {first.undone}, for which {who}"
        return _culprit(found, text, certain=True, has_position=True)
    has_stacks = all(rank.threads for rank in silent)
    how = "answers signals only: something holds its interpreter" if has_stacks else "gives no answer"
    return _culprit(
        silent, f"{_names(silent)} {how}, while {who} in {first.place}", certain=has_stacks, has_position=True
    )


def _awaited(ranks: Sequence[RankEvidence], waits: Sequence[Wait]) -> list[RankEvidence]:
    """Ranks that others wait for and that wait for nobody; those of whom it is sure, if there are any."""
    waiters = {wait.waiter for wait in waits}
    found = [wait for wait in waits if wait.awaited not in waiters]
    numbers = {wait.awaited for wait in found if wait.is_sure} or {wait.awaited for wait in found}
    return [rank for rank in ranks if rank.rank in numbers]


def _circle(ranks: Sequence[RankEvidence], waits: Sequence[Wait]) -> Culprit | None:
    """Ranks that wait for each other. Of messages alone it is the ring of an attention, which stands still as a whole
    when one link does."""
    if all(wait.is_message for wait in waits):
        return None
    firsts = {wait.waiter: wait.place for wait in reversed(waits)}
    circle = [rank for rank in ranks if rank.rank in firsts]
    described = "; ".join(f"rank {one.rank} waits in {firsts[one.rank]}" for one in circle[:MAX_NAMED])
    return _culprit(circle, f"{_names(circle)} wait for each other: {described}", certain=False)


def _by_progress(ranks: Sequence[RankEvidence]) -> Culprit | None:
    known = sorted((place, rank.rank, rank) for rank in ranks if (place := _progress(rank.status)) is not None)
    if len(known) < max(2, len(ranks)) or known[0][0] == known[1][0] or known[0][2].waits is True:
        return None
    behind, own, others = known[0][2], known[0][0][0], known[1][0][0]
    what = f"is at step {own}, the others at {others}" if own != others else "is behind in the same step"
    return _culprit([behind], f"{_names([behind])} {what}", certain=behind.waits is False, has_position=True)


def _progress(status: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
    """(step, micro-step, phase) as numbers that grow; None where a part is missing or unknown."""
    name = word(status, "phase") or ""
    if (name := _SAME_PHASE.get(name, name)) not in _PHASES:
        return None
    phase = _PHASES.index(name)
    is_after_all = phase > _PHASES.index("backward")
    return integer(status, "step") or 0, 2**31 if is_after_all else integer(status, "micro_step") or 0, phase


def _by_stacks(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """The ranks whose main thread is in no collective, while others are in one."""
    waiting = [rank.rank for rank in ranks if rank.waits is True]
    busy = [rank for rank in ranks if rank.waits is False]
    silent = [rank for rank in ranks if rank.waits is None]
    if busy and waiting:
        text = f"{_names(busy)} {'is' if len(busy) == 1 else 'are'} in no collective, while {_wait(waiting)}"
        return _culprit(busy, text, certain=len(busy) == 1 and not silent, has_position=True)
    if silent and waiting:
        return _culprit(silent, f"{_names(silent)} gave no stacks, while {_wait(waiting)}", certain=False)
    return None


def _all_wait(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """Nobody in particular: every rank waits, as when messages are lost on their way."""
    if not ranks or any(rank.waits is not True for rank in ranks):
        return None
    calls = sorted({call for rank in ranks if (call := waits_in(rank.threads)) is not None})
    hosts = _hosts(ranks)
    network = f"is the network between {_join(hosts)} all right?" if len(hosts) > 1 else "no rank is behind the others"
    return _culprit(ranks, f"every rank waits in {_join(calls)}; {network}", certain=False)


def _culprit(found: Sequence[RankEvidence], reason: str, *, certain: bool, has_position: bool = False) -> Culprit:
    """has_place: the reason ends with what the first of them does."""
    if has_position and found[0].place:
        reason = f"{reason}; {found[0].place}"
    lines = tuple(map(str, found[0].frames[:MAX_LINES]))
    return Culprit(tuple(rank.rank for rank in found), one_line(reason, 600), lines, certain)


def _names(ranks: Sequence[RankEvidence]) -> str:
    return f"{_numbers([rank.rank for rank in ranks])} on {_join(_hosts(ranks))}"


def _hosts(ranks: Sequence[RankEvidence]) -> list[str]:
    return list(dict.fromkeys(one_line(rank.host) for rank in ranks))


def _wait(ranks: Sequence[int]) -> str:
    return f"{_numbers(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_join([str(rank) for rank in ranks])}"


def _join(words: Sequence[str]) -> str:
    if len(words) > MAX_NAMED:
        words = [*words[: MAX_NAMED - 1], f"{len(words) - MAX_NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"


# Within a dump there is an empty line before every thread but the first; else the next dump begins, or a process.
_NEXT_DUMP = re.compile(r"^# rank .*$|(?<=[^\n])\n(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_HEADER = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+\b[^()]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,8}|\?\?\?) in (.+)')
# Files of torch whose functions block until other ranks come, and files that only lead there.
_BLOCKING_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BLOCKING_FUNCTIONS = {
    ("engine/attention/transport.py", "wait"): "a message of the attention",
    ("engine/attention/streams.py", "wait"): "a message of the attention",
    ("torch/distributed/rendezvous.py", "_create_c10d_store"): "the rendezvous",
}
_LEADING_FILES = (
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_tools/",
    "engine/distributed/waits.py",
    "/contextlib.py",
)


def parse_stacks(text: str) -> list[list[Frame]]:
    """The threads of the last dump in `text`, a file of which has one per request, each from the frame that runs.

    First the thread that runs the program: it began in a module; else the one that took the signal.
    """
    threads, current = list[list[Frame]](), -1
    for line in _NEXT_DUMP.split(text[-MAX_TEXT:])[-1].splitlines():
        if (header := _HEADER.match(line)) is not None:
            current = len(threads) if header[1] == "Current thread" else current
            threads.append([])
        elif (frame := _FRAME.match(line)) is not None and threads:
            threads[-1].append(Frame(frame[1], frame[2], frame[3]))
    ends = [thread[-1] if thread else Frame("", "", "") for thread in threads]
    began = [at for at, end in enumerate(ends) if end.file.startswith("<frozen runpy") or end.function == "<module>"]
    main = threads.pop([*began, current][0]) if threads else None
    return [] if main is None else [main, *threads]


def waits_in(threads: Sequence[Sequence[Frame]]) -> str | None:
    """Wherein the rank waits for others, as a function of torch or in words, or None."""
    main = threads[0] if threads else []
    # On a GPU backward runs in a thread of its own.
    is_backward = bool(main) and main[0].function == "_engine_run_backward"
    calls = map(_blocking_call, threads[1:] if is_backward else [main])
    return next((call for call in calls if call is not None), None)


def _blocking_call(thread: Sequence[Frame]) -> str | None:
    frames = (frame for frame in thread if not any(part in frame.file for part in _LEADING_FILES))
    frame = next(frames, None)
    if frame is None or frame.file.endswith(_BLOCKING_FILES):
        return frame and frame.function
    names = _BLOCKING_FUNCTIONS.items()
    return next((text for (file, name), text in names if frame.file.endswith(file) and frame.function == name), None)
