"""The nodes of a run as its controller keeps them: what each says, what it was asked for, when it is given up."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.control.attempt import read_log_starts, tail_text, torchrun_log
from cluster.control.link import Clock, LaunchTiming, Leftover, NodeLink, NodeStatus, as_pids
from cluster.failure import Death, KillFacts, first_death
from cluster.plan import LaunchPlan, NodePlan, node_spec
from cluster.remote_text import integer, rows, table, word
from engine.runs.files import read_json_object
from engine.runs.folder import RunFolder

_SWEEP_S = 10.0
_MAX_ERROR_BYTES = 4 << 20
_STOPS_RANKS = re.compile(r"failed \(exitcode: |closing signal SIG")
_STABLE_NS = 1_000_000_000  # a folder that changed this recently may change again within the tick of its clock


@dataclass(kw_only=True)
class Part:
    """One node of `run`; times in seconds are those of the controller's monotonic clock, in ns of this machine's.

    log_start: bytes of torchrun.log that earlier attempts wrote. is_waiting: it has not answered to the start.
    is_absent: nothing of the run was ever started there. stopped_ns: since when we want its end; death_before: what its
    torchrun had said by then. kill_at: when its processes are killed. lost: why it counts as lost, since lost_ns.
    sweep_until: until when a lost node may clear up; None: it was not asked to. given_up: why it is not waited for.
    """

    node: NodePlan
    run: RunFolder
    link: NodeLink
    status: NodeStatus
    log_start: int
    is_waiting: bool = False
    is_absent: bool = False
    was_alive: bool = False
    stopped_ns: int | None = None
    death_before: Death | None = None
    kill_at: float | None = None
    lost: str | None = None
    lost_ns: int = 0
    sweep_until: float | None = None
    given_up: str | None = None
    ended_at: float | None = None
    _sign: str | None = None
    _sign_stamp: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    # --- what it says ------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Take in what the node says."""
        self.status = self.link.poll()
        refusal = self.status.refusal
        if self.is_waiting and refusal is not None:
            self.is_waiting = False
            self.is_absent = refusal.kind != "unreachable"
            if not self.is_absent:
                self.link.stop("start", 0.0)
                self.given_up = "it could not be reached while it was asked to start, and may have begun all the same"
        self.is_waiting = self.is_waiting and not self.status.has_started
        if self.is_waiting or self.is_absent:
            return
        self.was_alive = self.was_alive or self.status.is_running
        if self.status.outcome is not None and self.ended_at is None:
            self.ended_at = now

    @property
    def has_started(self) -> bool:
        """Whether its ranks have been started."""
        is_started = self.status.phase in ("running", "stopping", "ended") and not (self.is_waiting or self.is_absent)
        return is_started and word(self.status.outcome, "cause") != "start_failed"

    @property
    def is_open(self) -> bool:
        """Whether something may still run there that answers."""
        is_over = self.status.outcome is not None or self.lost is not None or self.given_up is not None
        return not (self.is_waiting or self.is_absent or is_over)

    @property
    def is_unreachable(self) -> bool:
        """Whether the node cannot be heard, so that nobody knows."""
        return self.is_open and self.status.problem is not None

    def is_over(self, now: float, sync_s: float) -> bool:
        """Whether nothing more is to be had of this node; `sync_s`: how long the last of its files are waited for."""
        if self.is_absent or self.given_up is not None:
            return True
        if self.lost is not None:
            return self.sweep_until is None or self.status.swept is not None or now > self.sweep_until
        return self.ended_at is not None and (self.status.is_synced or now > self.ended_at + sync_s)

    def leftover(self, lease_s: float | None) -> Leftover | None:
        """What may still run there although it is no longer waited for."""
        status, reason = self.status, self.given_up or self.lost
        if status.outcome is not None:
            pids = as_pids(status.outcome.get("leftover_pids"))
            return Leftover(self.name, pids, "they did not end even when killed") if pids else None
        if self.sweep_until is not None and status.swept is not None:
            return Leftover(self.name, status.swept, "they would not die") if status.swept else None
        has_started = self.is_waiting or self.was_alive or status.phase != "none" or reason is not None
        if self.is_absent or not has_started:
            return None
        reason = reason or "it was left while it was stopping"
        if lease_s is not None:
            reason += f"; its ranks end by themselves {lease_s:g} s after it last heard of a launcher"
        return Leftover(self.name, (), reason)

    # --- what failed there -------------------------------------------------------------------------------------------

    @property
    def deaths(self) -> list[Death]:
        """How the supervisor saw ranks end, so far, in our clock; what makes no sense is left out."""
        deaths = []
        for entry in rows(self.status.outcome or self.status.supervisor, "deaths"):
            rank, at_ns = integer(entry, "rank"), integer(entry, "at_ns")
            if rank is not None and rank in self.node.ranks:
                time_ns = None if at_ns is None else at_ns - self.status.clock_offset_ns
                facts = kill_facts(table(entry, "memory"))
                deaths.append(Death(rank, integer(entry, "exit_code"), integer(entry, "pid"), time_ns, facts))
        return deaths

    @property
    def errors(self) -> list[dict[str, Any]]:
        """What its ranks left, with time_ns in our clock; files of ranks of other nodes are ignored."""
        errors = []
        for rank in self.node.ranks:
            path = self.run.log_path(self.name, rank).with_suffix(".error.json")
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if path.stat().st_size <= _MAX_ERROR_BYTES and (error := read_json_object(path)):
                    time_ns = integer(error, "time_ns")
                    at_ns = None if time_ns is None else time_ns - self.status.clock_offset_ns
                    errors.append({**error, "rank": rank, "time_ns": at_ns})
        return errors

    @property
    def torchrun_text(self) -> str:
        """The end of what its torchrun said in this attempt."""
        return tail_text(torchrun_log(self.node, self.run), start=self.log_start)

    @property
    def torchrun_death(self) -> Death | None:
        """The rank that its torchrun named first in this attempt."""
        death = first_death(self.torchrun_text, self.node.first_rank)
        return death if death is not None and death.rank in self.node.ranks else None

    @property
    def strong_sign(self) -> str | None:
        """That something failed there, as early as it can be seen."""
        outcome = self.status.outcome
        if outcome is not None and (word(outcome, "cause") == "lease" or integer(outcome, "exit_code") != 0):
            return self.status.end
        bad = next((death for death in self.deaths if death.exit_code), None)
        if bad is None:
            return self._sign_of_files()
        return f"rank {bad.rank} ended ({bad.signal.name if bad.signal is not None else f'exit code {bad.exit_code}'})"

    @property
    def weak_sign(self) -> str | None:
        """An end that looks well, but may have come too early."""
        if integer(self.status.outcome, "exit_code") == 0:
            return "its ranks have ended"
        return next((f"rank {death.rank} has ended" for death in self.deaths if not death.exit_code), None)

    def _sign_of_files(self) -> str | None:
        """What the ranks left, or their torchrun says when it ends them; read again only when that has changed."""
        try:
            changed_ns = self.run.log_dir(self.name).stat().st_mtime_ns
        except OSError:
            return None
        log = torchrun_log(self.node, self.run)
        stamp = changed_ns, log.stat().st_size if log.exists() else 0
        is_same = stamp == self._sign_stamp and time.time_ns() - changed_ns > _STABLE_NS
        if self._sign is None and not is_same:
            self._sign_stamp = stamp
            if errors := self.errors:
                self._sign = f"rank {errors[0]['rank']} failed"
            elif _STOPS_RANKS.search(self.torchrun_text):
                self._sign = "torchrun stops its ranks, for one has failed"
        return self._sign

    @property
    def silence(self) -> str:
        """For how long the node has said nothing, and why that is."""
        problem = self.status.problem or "no reason is known"
        return f"nothing was heard of it for {self.status.heard_s:.0f} s ({problem})"

    def why_lost(self, lost_s: float) -> str | None:
        """Why the node counts as lost, if it does; `lost_s`: how long it may say nothing."""
        status = self.status
        if status.phase == "lost":
            return status.problem or "its supervisor was killed, and the ranks with it"
        if status.heard_s > lost_s:
            return self.silence
        if status.phase == "none" and self.was_alive:
            return "nothing is left there of the run that it had begun"
        return None


def kill_facts(facts: Mapping[str, Any]) -> KillFacts:
    """What a supervisor knows of a process that SIGKILL may have ended."""
    return KillFacts(word(facts, "evidence", 500), word(facts, "hint", 500), table(facts, "memory") or None)


class Fleet:
    """All nodes of one run. lease_s: how long they go on without a launcher; None: for ever."""

    def __init__(
        self, plan: LaunchPlan, run: RunFolder, links: Sequence[NodeLink], lease_s: float | None, clock: Clock
    ) -> None:
        starts, self.parts = read_log_starts(run), list[Part]()
        for node, link in zip(plan.nodes, links, strict=True):
            start = starts.get(torchrun_log(node, run).relative_to(run.path).as_posix(), 0)
            self.parts.append(Part(node=node, run=run, link=link, status=NodeStatus(node.name), log_start=start))
        self.plan, self.run, self.lease_s, self._clock = plan, run, lease_s, clock
        self._next_heartbeat = 0.0

    @property
    def statuses(self) -> list[NodeStatus]:
        """What is known of every node, in their order."""
        return [part.status for part in self.parts]

    @property
    def is_starting(self) -> bool:
        """Whether a node has neither begun nor refused to."""
        return any(part.is_waiting for part in self.parts)

    @property
    def leftover(self) -> tuple[Leftover, ...]:
        """What may still run, were the controller to leave now."""
        return tuple(left for part in self.parts if (left := part.leftover(self.lease_s)) is not None)

    def follow(self, *, start: bool) -> None:
        """Watch every node; start: have it begin."""
        for part in self.parts:
            if start:
                part.is_waiting = True
                part.link.start(node_spec(self.plan, part.node, lease_s=self.lease_s))
            part.link.follow()

    def look(self) -> None:
        """Take in what the nodes say."""
        for part in self.parts:
            part.look(self._clock.monotonic())

    def beat(self, interval_s: float) -> None:
        """Renew the leases, when it is time to."""
        now = self._clock.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + interval_s
        for part in self.parts:
            if part.is_open:
                part.link.beat()

    def is_over(self, sync_s: float) -> bool:
        """Whether nothing more is to be had of any node."""
        return all(part.is_over(self._clock.monotonic(), sync_s) for part in self.parts)

    def find_lost(self, lost_s: float) -> list[str]:
        """One line per node that is lost from now on; those that answer are being swept."""
        lines = []
        for part in self.parts:
            reason = part.why_lost(lost_s) if part.is_open else None
            if reason is None:
                continue
            self._lose(part, reason)
            if part.status.heard_s <= lost_s:
                part.sweep_until = self._clock.monotonic() + _SWEEP_S
                part.link.sweep()
            lines.append(f"{part.name}: {reason}")
        return lines

    def _lose(self, part: Part, reason: str) -> None:
        """Count it as lost since it was last heard."""
        part.lost, part.lost_ns = reason, self._clock.time_ns() - int(part.status.heard_s * 1e9)

    def stop(self, cause: str, grace_s: float, parts: Iterable[Part] | None = None) -> None:
        """Ask `parts` (None: all) for the end, unless they were asked to be as quick before."""
        kill_at = self._clock.monotonic() + grace_s
        for part in self.parts if parts is None else parts:
            if not part.is_open or (part.kill_at is not None and part.kill_at <= kill_at):
                continue
            if part.stopped_ns is None:
                part.stopped_ns, part.death_before = self._clock.time_ns(), part.torchrun_death
            part.kill_at = kill_at
            part.link.stop(cause, grace_s)

    def give_up(self, timing: LaunchTiming) -> None:
        """No longer wait for nodes that were to have ended long ago; what cannot be heard by then is lost."""
        for part in self.parts:
            patience_s = 0.0 if part.is_unreachable and part.status.heard_s > timing.unreachable_s else timing.kill_s
            if part.is_open and part.kill_at is not None and self._clock.monotonic() > part.kill_at + patience_s:
                problem = part.status.problem
                part.given_up = f"it did not end in time{f' ({problem})' if problem else ''}"
                if problem:
                    self._lose(part, part.silence)

    def abandon(self, timing: LaunchTiming) -> None:
        """Have everything killed, in bounded time, whatever else goes wrong."""
        deadline = self._clock.monotonic() + timing.kill_s
        for part in self.parts:
            part.is_waiting = False  # what was asked to begin may do so all the same
        while True:
            for part in self.parts:
                with contextlib.suppress(Exception):
                    part.look(self._clock.monotonic())
                    self.stop("exception", 0.0, [part])
            if self._clock.monotonic() >= deadline or not any(part.is_open for part in self.parts):
                return
            self._clock.sleep(timing.poll_s)
