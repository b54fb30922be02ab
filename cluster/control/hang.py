"""Notices that a run makes no steps any more, has every rank write down where it is, and ends the run in the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cluster.agent.folder import NodeFiles, read_json
from cluster.control.attempt import tail_text
from cluster.control.fleet import Fleet, Part
from cluster.control.hang_blame import RankEvidence, find_culprit
from cluster.control.link import Clock, LaunchTiming
from cluster.failure import Failure
from cluster.remote_text import integer, number, table, word
from engine.runs.files import JsonLinesTail
from engine.runs.folder import RunFolder

DIAGNOSE_S = 30.0  # without any advance, or so many of the slowest steps: then ranks are asked where they are
SLOW_STEPS = 5.0
KILL_S = 10 * 60.0  # as long as NCCL itself waits: a stall may pass
LONG_DIAGNOSE_S = 15 * 60.0  # before the first step, after the last, and where no steps are made
LONG_KILL_S = 60 * 60.0  # as long as the ranks wait for each other
STOPPED_S = 10.0  # a rank that somebody stopped does not come back by itself
TRAINING_PHASE = "train"
_FLIGHT_S = 3.0  # for flight records: ranks look for a request every half second, and what they write is copied
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
        phases = [str(event.get("phase")) for event in events if event.get("kind") == "phase"]
        self.phase = [self.phase, *phases][-1]
        for row in rows:
            step = integer(row, "step")
            self.step = self.step if step is None else step
            if (seconds := number(row, "step_time_s")) is not None:
                self.step_times.append(seconds)
        if self._news_at is None:
            self._news_at = self._now() - self._age()
        elif self._ranks_advance() or rows or phases:
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
            files = (file for node in os.scandir(self._logs) for file in os.scandir(node.path))
            return max((file.stat().st_mtime_ns for file in files if file.name.endswith(_STATUS)), default=0)
        return 0

    def _age(self) -> float:
        """Seconds since the run last wrote; 0 for one that has only begun."""
        written = [tail.path.stat().st_mtime_ns for tail in self._tails if tail.path.exists()]
        newest = max([*written, self._said])
        return max(0.0, (time.time_ns() - newest) / 1e9) if newest else 0.0


class HangWatch:
    """Watches the steps of one run: a stall is diagnosed early, and `poll` gives a failure once it has lasted too long.

    tell: is told once of every stall, and who seems to hold it up.
    """

    def __init__(self, fleet: Fleet, steps: StepWatch, clock: Clock, tell: Callable[[str], None]) -> None:
        self._fleet, self._steps, self._clock, self._tell = fleet, steps, clock, tell
        self._is_told = self._is_last = False
        self._nonce = ""
        self._asked_at: float | None = None
        self._stopped: dict[str, tuple[int, str | None]] = {}

    def poll(self, timing: LaunchTiming) -> Failure | None:
        """The failure; None while the run goes on, may still go on, or its ranks are still reporting."""
        self._note_stopped()
        silence_s, (diagnose_s, kill_s) = self._steps.silence_s, self._limits_s()
        if silence_s <= diagnose_s:
            self._asked_at, self._is_told, self._is_last = None, False, False  # it only took its time
            return None
        is_over = silence_s > kill_s
        if self._asked_at is None or (is_over and not self._is_last):  # in the end once more, for how it stands now
            self._asked_at, self._nonce, self._is_last = self._clock.monotonic(), secrets.token_hex(8), is_over
            for part in self._fleet.parts:
                part.link.request_stacks(self._nonce)
            return None
        asked_s = self._clock.monotonic() - self._asked_at
        # What ranks wrote has some time to come here, those of a node that gives no answer some more.
        have_reported = asked_s > _FLIGHT_S and all(self._answer(part) is not None for part in self._fleet.parts)
        if asked_s < timing.stacks_s and not have_reported:
            return None
        if is_over:
            return self._accuse()
        if not self._is_told:
            self._is_told = True
            self._tell(f"{self._accuse().message}; the run is stopped if nothing moves for {kill_s:.0f} s")
        return None

    def _limits_s(self) -> tuple[float, float]:
        """Those of `StepWatch`; shorter while a rank is stopped by somebody."""
        config, steps = self._fleet.plan.config, self._steps
        diagnose_s, kill_s = steps.limits_s(config.cluster.hang_timeout_s, config.train.steps)
        if any(count >= 2 for count, _ in self._stopped.values()):
            kill_s = min(kill_s, max(STOPPED_S, 2 * max(steps.step_times, default=0.0)))
        return min(diagnose_s, kill_s), kill_s

    def _note_stopped(self) -> None:
        """Count for how many reports of its node's health in a row a rank has been stopped."""
        for status in self._fleet.statuses:
            told_at = word(status.health, "at")
            for name, facts in table(status.health, "ranks").items():
                count, at = self._stopped.get(name, (0, None))
                if word(facts, "state") not in ("T", "t"):
                    self._stopped.pop(name, None)
                elif at != told_at:
                    self._stopped[name] = (count + 1, told_at)

    def _accuse(self) -> Failure:
        evidence = [self._evidence(part, rank) for part in self._fleet.parts for rank in part.node.ranks]
        silence = f"no rank has advanced for {self._steps.silence_s:.0f} s"
        culprit = find_culprit(evidence)
        if culprit is None:
            return Failure("hang", "Hang", f"{silence}, and no rank shows why")
        accused = next(one for one in evidence if one.rank == culprit.ranks[0])
        return Failure(
            "hang",
            "Hang",
            f"{silence}{':' if culprit.certain else '; probably:'} {culprit.reason}",
            rank=accused.rank,
            host=accused.host,
            step=integer(accused.status, "step"),
            phase=word(accused.status, "phase"),
            stacks=str(self._fleet.run.log_path(accused.host, accused.rank).with_suffix(".stacks")),
            details=culprit.lines,
        )

    def _evidence(self, part: Part, rank: int) -> RankEvidence:
        log = self._fleet.run.log_path(part.name, rank)
        facts = table(self._answer(part) or table(part.status.health, "ranks"), str(rank))
        # What it wrote for an earlier request shows where it was, not is.
        stacks = "" if facts.get("answered") is False else tail_text(log.with_suffix(".stacks"))
        flight = read_json(str(log.with_suffix(".flight.json")))
        return RankEvidence(
            rank,
            part.name,
            word(facts, "state"),
            read_json(str(log.with_suffix(_STATUS))),
            stacks or None,
            flight if word(flight, "nonce") == self._nonce else None,
        )

    def _answer(self, part: Part) -> Mapping[str, Any] | None:
        """The ranks of stacks_done.json of a node, if that answers our question."""
        document = read_json(NodeFiles(str(self._fleet.run.path), part.name).stacks_done)
        return table(document, "ranks") if word(document, "nonce") == self._nonce else None
