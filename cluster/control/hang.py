"""Notices that a run makes no steps any more, has every rank write down where it is, and says who holds it up.

`find_culprit` is pure. It goes through the rules from the surest to the weakest:

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

import contextlib
import functools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.agent.folder import NodeFiles, read_json
from cluster.control.attempt import tail_text
from cluster.control.hang_records import (
    Edge,
    Flight,
    Frame,
    ThreadStack,
    find_mismatch,
    main_thread,
    parse_stacks,
    read_flight,
    sinks,
    wait_edges,
    waits_in,
)
from cluster.control.link import Clock, LaunchTiming, NodeLink, NodeStatus
from cluster.failure import Failure
from cluster.plan import LaunchPlan, NodePlan
from cluster.remote_text import one_line
from cluster.values import integer, number, table, word
from engine.runs.folder import RunFolder
from engine.runs.records import JsonLinesTail

_RECENT_STEPS = 20
_LOOK_S = 1.0  # between two looks at what the ranks themselves say
_STATUS = ".status.json"


class StepWatch:
    """The steps and phases that rank 0 recorded, and whether any rank says that it is further than before.

    A rank says so at every phase of a step, and while it prepares data, evaluates and saves. Silence counts from when
    news was first seen here, so `poll` often; for one who joins later, from the age of what is there. last_bytes: of
    the records that are there already only the end is read.
    """

    def __init__(self, run: RunFolder, now: Callable[[], float], last_bytes: int | None = None) -> None:
        self._tails = [JsonLinesTail(run.path / f"{name}.jsonl", last_bytes) for name in ("metrics", "events")]
        self._now, self._logs = now, run.path / "logs"
        self._said, self._looked_at = self._newest_status(), now()
        self._news_at: float | None = None
        self.step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.step = 0
        self.phase = ""

    def poll(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The steps and the events that are new."""
        rows, events = (tail.poll() for tail in self._tails)
        for event in events:
            if event.get("kind") == "phase":
                self.phase = str(event.get("phase"))
        for row in rows:
            step = integer(row, "step")
            self.step = self.step if step is None else step
            if (seconds := number(row, "step_time_s")) is not None:
                self.step_times.append(seconds)
        if self._news_at is None:
            self._news_at = self._now() - self._age()
        elif self._ranks_advance() or rows or any(event.get("kind") == "phase" for event in events):
            self.touch()
        return rows, events

    def touch(self) -> None:
        """Count the silence from now on."""
        self._news_at = self._now()

    @property
    def silence_s(self) -> float:
        """Seconds in which no rank advanced."""
        return 0.0 if self._news_at is None else self._now() - self._news_at

    def limits_s(self, configured_s: float | None, total_steps: int) -> tuple[float, float]:
        """After how long without any advance ranks are asked where they are, and after how long the run is stopped.

        As configured, else by the slowest of the last steps; long where no steps are made.
        """
        if not self.step_times or self.phase not in (TRAINING_PHASE, "") or self.step >= total_steps:
            diagnose_s, kill_s = LONG_DIAGNOSE_S, max(LONG_KILL_S, configured_s or 0.0)
        else:
            slowest_s = SLOW_STEPS * max(self.step_times)
            diagnose_s = max(DIAGNOSE_S, slowest_s)
            kill_s = max(KILL_S, slowest_s) if configured_s is None else configured_s
        return min(diagnose_s, kill_s), kill_s

    def _ranks_advance(self) -> bool:
        """Whether a rank has replaced its status since the last look: it does so only when it is further."""
        if self._now() < self._looked_at + _LOOK_S:
            return False
        self._looked_at, before = self._now(), self._said
        self._said = self._newest_status()
        return self._said != before

    def _newest_status(self) -> int:
        """When a rank last replaced its status, by the clock of the files; 0: none has."""
        with contextlib.suppress(OSError):  # a folder that is just being made
            stamps = (
                file.stat().st_mtime_ns
                for node in os.scandir(self._logs)
                for file in os.scandir(node.path)
                if file.name.endswith(_STATUS)
            )
            return max(stamps, default=0)
        return 0

    def _age(self) -> float:
        """Seconds since the run last wrote; 0 for one that has only begun."""
        written = [tail.path.stat().st_mtime_ns for tail in self._tails if tail.path.exists()]
        newest = max([*written, self._said])
        return max(0.0, (time.time_ns() - newest) / 1e9) if newest else 0.0


DIAGNOSE_S = 30.0  # without any advance, or so many of the slowest steps: then ranks are asked where they are
SLOW_STEPS = 5.0
KILL_S = 10 * 60.0  # as long as NCCL itself waits: a stall may pass
LONG_DIAGNOSE_S = 15 * 60.0  # before the first step, after the last, and where no steps are made
LONG_KILL_S = 60 * 60.0  # as long as the ranks wait for each other
STOPPED_S = 10.0  # a rank that somebody stopped does not come back by itself
TRAINING_PHASE = "train"
_FLIGHT_S = 3.0  # for flight records: ranks look for a request every half second, and what they write is copied


class HangWatch:
    """Watches the steps of one run: a stall is diagnosed early, and `poll` gives a failure once it has lasted too long.

    tell: is told once of every stall, and who seems to hold it up.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        run: RunFolder,
        links: Sequence[NodeLink],
        steps: StepWatch,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._plan, self._run, self._links, self._steps, self._clock = plan, run, links, steps, clock
        self._tell, self._is_told, self._is_last = tell, False, False
        self._nonce = ""
        self._asked_at: float | None = None
        self._stopped: dict[str, tuple[int, str | None]] = {}

    def poll(self, statuses: Sequence[NodeStatus], timing: LaunchTiming) -> Failure | None:
        """The failure; None while the run goes on, may still go on, or its ranks are still reporting."""
        self._note_stopped(statuses)
        silence_s, (diagnose_s, kill_s) = self._steps.silence_s, self.limits_s
        if silence_s <= diagnose_s:
            self._asked_at, self._is_told, self._is_last = None, False, False  # it only took its time
            return None
        is_over = silence_s > kill_s
        if self._asked_at is None or (is_over and not self._is_last):  # in the end once more, for how it stands now
            self._asked_at, self._nonce, self._is_last = self._clock.monotonic(), secrets.token_hex(8), is_over
            for link in self._links:
                link.request_stacks(self._nonce)
            return None
        if self._clock.monotonic() < self._asked_at + timing.stacks_s and not self._have_reported():
            return None
        if is_over:
            return self._accuse(statuses)
        if not self._is_told:
            self._is_told = True
            self._tell(f"{self._accuse(statuses).message}; the run is stopped if nothing moves for {kill_s:.0f} s")
        return None

    @property
    def limits_s(self) -> tuple[float, float]:
        """Those of `StepWatch`; shorter while a rank is stopped by somebody."""
        config, steps = self._plan.config, self._steps
        diagnose_s, kill_s = steps.limits_s(config.cluster.hang_timeout_s, config.train.steps)
        if any(count >= 2 for count, _ in self._stopped.values()):
            kill_s = min(kill_s, max(STOPPED_S, 2 * max(steps.step_times, default=0.0)))
        return min(diagnose_s, kill_s), kill_s

    def _note_stopped(self, statuses: Sequence[NodeStatus]) -> None:
        """Count for how many reports of its node's health in a row a rank has been stopped."""
        for status in statuses:
            told_at = word(status.health, "at")
            for name, facts in table(status.health, "ranks").items():
                count, at = self._stopped.get(name, (0, None))
                if word(facts, "state") not in ("T", "t"):
                    self._stopped.pop(name, None)
                elif at != told_at:
                    self._stopped[name] = (count + 1, told_at)

    def _have_reported(self) -> bool:
        """Whether every node says that its ranks have answered, and what they wrote has had time to come here."""
        assert self._asked_at is not None
        has_come = self._clock.monotonic() > self._asked_at + _FLIGHT_S
        return has_come and all(self._answer(node) is not None for node in self._plan.nodes)

    def _accuse(self, statuses: Sequence[NodeStatus]) -> Failure:
        evidence = [
            self._evidence(node, rank, self._answer(node) or table(status.health, "ranks"))
            for node, status in zip(self._plan.nodes, statuses, strict=True)
            for rank in node.ranks
        ]
        silence = f"no rank has advanced for {self._steps.silence_s:.0f} s"
        culprit = find_culprit(evidence)
        if culprit is None:
            return Failure("hang", "Hang", f"{silence}, and no rank shows why", step=self._steps.step or None)
        accused = next(one for one in evidence if one.rank == culprit.ranks[0])
        step = integer(accused.status, "step")
        return Failure(
            "hang",
            "Hang",
            f"{silence}{':' if culprit.certain else '; probably:'} {culprit.reason}",
            rank=accused.rank,
            host=accused.host,
            step=self._steps.step or None if step is None else step,
            phase=word(accused.status, "phase"),
            stacks=str(self._run.log_path(accused.host, accused.rank).with_suffix(".stacks")),
            details=culprit.lines,
        )

    def _evidence(self, node: NodePlan, rank: int, ranks: Mapping[str, Any]) -> RankEvidence:
        log, facts = self._run.log_path(node.name, rank), table(ranks, str(rank))
        # What it wrote for an earlier request shows where it was, not is.
        stacks = "" if facts.get("answered") is False else tail_text(log.with_suffix(".stacks"))
        flight = read_json(str(log.with_suffix(".flight.json")))
        return RankEvidence(
            rank,
            node.name,
            word(facts, "state"),
            read_json(str(log.with_suffix(_STATUS))),
            stacks or None,
            flight if word(flight, "nonce") == self._nonce else None,
        )

    def _answer(self, node: NodePlan) -> Mapping[str, Any] | None:
        """The ranks of stacks_done.json of `node`, if that answers our question."""
        document = read_json(NodeFiles(str(self._run.path), node.name).stacks_done)
        return table(document, "ranks") if word(document, "nonce") == self._nonce else None


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

    @functools.cached_property
    def threads(self) -> tuple[ThreadStack, ...]:
        """What `stacks` says."""
        return parse_stacks(self.stacks or "")

    @functools.cached_property
    def recorded(self) -> Flight | None:
        """What `flight` says."""
        return read_flight(self.rank, self.flight)

    @property
    def waits(self) -> bool | None:
        """Whether it waits for others, by its stacks; None: they say nothing."""
        return waits_in(self.threads) is not None if self.threads else None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Where its program is."""
        main = main_thread(self.threads)
        return () if main is None else main.frames

    @property
    def place(self) -> str:
        """What it is doing, from its stack and its status, which may be old where nothing else answers."""
        status = self.status or {}
        parts = [f"it is in {self.frames[0]}"] if self.frames else []
        if integer(status, "step") is not None:
            parts.append(f"{'' if self.recorded else 'last seen at '}step {status['step']}")
        if isinstance(status.get("phase"), str):
            parts.append(f"phase {one_line(status['phase'], 40)}")
        return ", ".join(parts)


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
    rules = (_by_process, _by_collectives, _by_progress, _by_stacks, _all_wait)
    return next((found for rule in rules if (found := rule(ranks)) is not None), None)


def _by_process(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """A process that is gone or stopped, or cannot be woken while others can."""
    for letters, what in (
        ((GONE, "Z", "X"), "its process is gone"),
        (("T", "t"), "its process is stopped, by SIGSTOP or a debugger"),
        (("D",), "its process is in uninterruptible input or output: a disk or network file system does not answer"),
    ):
        found = [rank for rank in ranks if rank.process_state in letters]
        if letters == ("D",):  # for a moment, everybody is now and then
            found = [rank for rank in found if rank.waits is not True]
        if found and (letters != ("D",) or len(found) < len(ranks)):
            return _culprit(found, f"{_names(found)}: {what}", certain=True)
    return None


def _by_collectives(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """Who is awaited and waits for nobody, by flight records."""
    flights = {rank.rank: rank.recorded for rank in ranks if rank.recorded is not None}
    if not flights:
        return None
    if (mismatch := find_mismatch(flights)) is not None:
        odd = [rank for rank in ranks if rank.rank in mismatch.ranks]
        text = f"{_names(odd)} entered {mismatch.own} where the others entered {mismatch.others.op}"
        if mismatch.own.op == mismatch.others.op:
            text = f"{_names(odd)} entered {mismatch.own} with sizes {mismatch.own.sizes}, the others with "
            text += one_line(mismatch.others.sizes)
        return _culprit(odd, text, certain=mismatch.is_minority)
    edges = wait_edges(flights, [rank.rank for rank in ranks])
    if awaited := sinks(edges):
        return _awaited([rank for rank in ranks if rank.rank in awaited], edges)
    return _of_circle(ranks, edges)


def _awaited(found: Sequence[RankEvidence], edges: Sequence[Edge]) -> Culprit:
    """The ranks that others wait for, and what these miss."""
    numbers = {rank.rank for rank in found}
    missing = [edge for edge in edges if edge.awaited in numbers]
    waiters = sorted({edge.waiter for edge in missing})
    edge = next((edge for edge in missing if edge.collective is not None), missing[0])
    wait = _wait(waiters)
    silent = [rank for rank in found if rank.recorded is None]
    if not silent:
        text = f"{_names(found)} {edge.undone}, for which {wait}"
        return _culprit(found, text, certain=True, has_place=True)
    has_stacks = all(rank.threads for rank in silent)
    how = "answers signals only: something holds its interpreter" if has_stacks else "gives no answer"
    text = f"{_names(silent)} {how}, while {wait} in {edge.waits_in}"
    return _culprit(silent, text, certain=has_stacks, has_place=True)


def _of_circle(ranks: Sequence[RankEvidence], edges: Sequence[Edge]) -> Culprit | None:
    """Ranks that wait for each other: the one whose stack says that it does not wait after all, else all of them.

    A collective may have been started ahead of time, by a rank that then went on and hangs elsewhere. A circle of
    messages alone is the ring of an attention, which stands still as a whole when one link does.
    """
    busy = {rank.rank for rank in ranks if rank.waits is False}
    if busy:
        edges = [edge for edge in edges if edge.waiter not in busy]
        found = [rank for rank in ranks if rank.rank in busy and rank.rank in sinks(edges)]
        return _awaited(found, edges) if found else None
    circle = [rank for rank in ranks if rank.rank in {edge.waiter for edge in edges}]
    if all(edge.collective is None for edge in edges):
        return None
    firsts = [edge for _, edge in sorted({edge.waiter: edge for edge in reversed(edges)}.items())]
    described = "; ".join(f"rank {edge.waiter} waits in {edge.waits_in}" for edge in firsts[:MAX_NAMED])
    return _culprit(circle, f"{_names(circle)} wait for each other: {described}", certain=False)


def _by_progress(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """The rank that is behind all others in step or phase."""
    places = {rank.rank: _progress(rank.status) for rank in ranks}
    known = {number: place for number, place in places.items() if place is not None}
    if len(known) < 2 or len(known) < len(ranks):
        return None
    first = min(known.values())
    behind = [rank for rank in ranks if known[rank.rank] == first]
    if len(behind) != 1 or behind[0].waits is True:
        return None
    others = min(place for place in known.values() if place != first)
    what = (
        f"is at step {first[0]}, the others at {others[0]}" if first[0] != others[0] else "is behind in the same step"
    )
    return _culprit(behind, f"{_names(behind)} {what}", certain=behind[0].waits is False, has_place=True)


def _by_stacks(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """The ranks whose main thread is in no collective, while others are in one."""
    busy = [rank for rank in ranks if rank.waits is False]
    waiting = [rank.rank for rank in ranks if rank.waits is True]
    if busy and waiting:
        text = f"{_names(busy)} {'is' if len(busy) == 1 else 'are'} in no collective, while {_wait(waiting)}"
        return _culprit(busy, text, certain=len(busy) == 1 and len(waiting) == len(ranks) - 1, has_place=True)
    silent = [rank for rank in ranks if rank.waits is None]
    if silent and waiting:
        return _culprit(silent, f"{_names(silent)} gave no stacks, while {_wait(waiting)}", certain=False)
    return None


def _all_wait(ranks: Sequence[RankEvidence]) -> Culprit | None:
    """Nobody in particular: every rank waits, as when messages are lost on their way."""
    if not ranks or any(rank.waits is not True for rank in ranks):
        return None
    calls = sorted({call for rank in ranks if (call := waits_in(rank.threads)) is not None})
    hosts = list(dict.fromkeys(one_line(rank.host) for rank in ranks))
    network = f"is the network between {_join(hosts)} all right?" if len(hosts) > 1 else "no rank is behind the others"
    return _culprit(ranks, f"every rank waits in {_join(calls)}; {network}", certain=False)


def _culprit(found: Sequence[RankEvidence], reason: str, *, certain: bool, has_place: bool = False) -> Culprit:
    """has_place: the reason ends with what the first of them does."""
    if has_place and found[0].place:
        reason = f"{reason}; {found[0].place}"
    lines = tuple(map(str, found[0].frames[:MAX_LINES]))
    return Culprit(tuple(rank.rank for rank in found), one_line(reason, 600), lines, certain)


def _progress(status: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
    """(step, micro-step, phase) as numbers that grow; None where a part is missing or unknown."""
    if status is None or status.get("phase") not in _PHASES:
        return None
    phase = _PHASES[status["phase"]]
    micro_step = integer(status, "micro_step") or 0
    if phase > _PHASES["backward"]:
        micro_step = 2**31  # after all of them
    return integer(status, "step") or 0, micro_step, phase


def _names(ranks: Sequence[RankEvidence]) -> str:
    hosts = list(dict.fromkeys(one_line(rank.host) for rank in ranks))
    return f"{_numbers([rank.rank for rank in ranks])} on {_join(hosts)}"


def _wait(ranks: Sequence[int]) -> str:
    return f"{_numbers(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_join([str(rank) for rank in ranks])}"


def _join(words: Sequence[str]) -> str:
    if len(words) > MAX_NAMED:
        words = [*words[: MAX_NAMED - 1], f"{len(words) - MAX_NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"
