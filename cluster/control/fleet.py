"""The nodes of a run as its controller keeps them: what each says, what it was asked for, when it is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.control.attempt import read_log_starts, tail_text, torchrun_log
from cluster.control.link import TIME_LIMIT, Clock, LaunchTiming, Leftover, NodeLink, NodeStatus, as_pids
from cluster.failure import Death, KillFacts, first_death
from cluster.plan import LaunchPlan, NodePlan
from cluster.values import integer, rows, table, word
from engine.runs.folder import RunFolder

_SWEEP_S = 10.0


@dataclass(frozen=True)
class StopOrder:
    """The first request to stop that a node got from us: when, in our clock, and what its torchrun had said by then."""

    at_ns: int
    death: Death | None = None


@dataclass(frozen=True)
class Loss:
    """Why a node was given up, and since when it said nothing, in our clock."""

    reason: str
    since_ns: int


@dataclass(kw_only=True)
class Part:
    """One node of the run; times are those of the controller's monotonic clock.

    log_start: bytes of torchrun.log that earlier attempts wrote.
    is_absent: nothing of the run was ever started there. kill_at: when its processes are killed. sweep_until: until
    when a lost node may clear up; None: it was not asked to.
    """

    node: NodePlan
    link: NodeLink
    status: NodeStatus
    log_start: int
    order: StopOrder | None = None
    loss: Loss | None = None
    sweep_until: float | None = None
    is_absent: bool = False
    was_alive: bool = False
    given_up: str | None = None
    kill_at: float | None = None
    ended_at: float | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

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

    def torchrun_death(self, run: RunFolder) -> Death | None:
        """The rank that its torchrun named first in this attempt."""
        text = tail_text(torchrun_log(self.node, run), start=self.log_start)
        death = first_death(text, self.node.first_rank)
        return death if death is not None and death.rank in self.node.ranks else None

    @property
    def has_ended(self) -> bool:
        """Whether the node itself said how its part ended."""
        return self.status.outcome is not None

    @property
    def is_open(self) -> bool:
        """Whether something may still run there that answers."""
        return not (self.is_absent or self.has_ended or self.loss is not None or self.given_up is not None)

    @property
    def is_running(self) -> bool:
        """Whether the node says that it goes on."""
        return self.is_open and not self.is_mute and self.status.phase in ("starting", "running", "stopping")

    @property
    def is_mute(self) -> bool:
        """Whether the node cannot be heard, so that nobody knows."""
        return self.is_open and self.status.problem is not None

    def look(self, now: float) -> None:
        """Take in what the node says."""
        self.status = self.link.poll()
        self.is_absent = self.is_absent and not self.status.is_begun
        if self.is_absent:
            return
        self.was_alive = self.was_alive or self.status.phase in ("starting", "running", "stopping")
        if self.has_ended and self.ended_at is None:
            self.ended_at = now

    def is_over(self, now: float, sync_s: float) -> bool:
        """Whether nothing more is to be had of this node; `sync_s`: how long the last of its files are waited for."""
        if self.is_absent or self.given_up is not None:
            return True
        if self.loss is not None:
            return self.sweep_until is None or self.status.swept is not None or now > self.sweep_until
        return self.ended_at is not None and (self.status.is_synced or now > self.ended_at + sync_s)

    @property
    def silence(self) -> str:
        """For how long the node has said nothing, and why that is."""
        problem = self.status.problem or "no reason is known"
        return f"nothing was heard of it for {self.status.heard_s:.0f} s ({problem})"

    def lose(self, reason: str, clock: Clock) -> None:
        """Count the node as lost since it was last heard."""
        self.loss = Loss(reason, clock.time_ns() - int(self.status.heard_s * 1e9))

    def why_lost(self, lost_s: float) -> str | None:
        """Why the node counts as lost, if it does; `lost_s`: how long it may say nothing."""
        status = self.status
        if status.phase == "lost":
            return self.status.problem or "its supervisor was killed, and the ranks with it"
        if status.heard_s > lost_s:
            return self.silence
        if status.phase == "none" and self.was_alive:
            return "nothing is left there of the run that it had begun"
        return None

    def leftover(self, lease_s: float | None) -> Leftover | None:
        """What may still run there although it is no longer waited for."""
        if self.status.outcome is not None:
            pids = as_pids(self.status.outcome.get("leftover_pids"))
            return Leftover(self.name, pids, "they did not end even when killed") if pids else None
        if self.is_absent or (self.status.phase == "none" and not self.was_alive and self.loss is None):
            return None
        if self.sweep_until is not None and self.status.swept is not None:
            return Leftover(self.name, self.status.swept, "they would not die") if self.status.swept else None
        reason = self.given_up or (self.loss.reason if self.loss is not None else "it was left while it was stopping")
        if lease_s is not None:
            reason += f"; its ranks end by themselves {lease_s:g} s after it last heard of a launcher"
        return Leftover(self.name, (), reason)


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
            self.parts.append(Part(node=node, link=link, status=NodeStatus(node.name), log_start=start))
        self.plan, self.run, self.lease_s, self._clock = plan, run, lease_s, clock
        self._next_beat = 0.0

    @property
    def statuses(self) -> list[NodeStatus]:
        """What is known of every node, in their order."""
        return [part.status for part in self.parts]

    @property
    def is_begun(self) -> bool:
        """Whether the ranks of all nodes have been started."""
        return all(
            not part.is_absent
            and part.status.phase in ("running", "stopping", "ended")
            and word(part.status.outcome, "cause") != "start_failed"
            for part in self.parts
        )

    @property
    def is_mute(self) -> bool:
        """Whether none of the nodes that may still run can be heard."""
        is_open = [part for part in self.parts if part.is_open]
        return bool(is_open) and all(part.is_mute for part in is_open)

    @property
    def is_at_limit(self) -> bool:
        """Whether ranks are stopping before a time limit: ends that they come to then are no failures."""
        return any(part.status.supervisor.get("stop_cause") == TIME_LIMIT for part in self.parts)

    @property
    def leftover(self) -> tuple[Leftover, ...]:
        """What may still run, were the controller to leave now."""
        return tuple(left for part in self.parts if (left := part.leftover(self.lease_s)) is not None)

    @property
    def unsynced(self) -> list[str]:
        """Nodes that have ended, but whose files did not all arrive."""
        return [part.name for part in self.parts if part.has_ended and not part.status.is_synced]

    def follow(self) -> None:
        """Begin to watch every node on which something was started."""
        for part in self.parts:
            if not part.is_absent:
                part.link.follow()

    def look(self) -> None:
        """Take in what the nodes say."""
        for part in self.parts:
            part.look(self._clock.monotonic())

    def beat(self, interval_s: float) -> None:
        """Renew the leases, when it is time to."""
        now = self._clock.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + interval_s
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
            part.lose(reason, self._clock)
            if part.status.heard_s <= lost_s:
                part.sweep_until = self._clock.monotonic() + _SWEEP_S
                part.link.sweep()
            lines.append(f"{part.name}: {reason}")
        return lines

    def stop(self, cause: str, grace_s: float, parts: Iterable[Part] | None = None) -> None:
        """Ask `parts` (None: all) for the end, unless they were asked to be as quick before."""
        kill_at = self._clock.monotonic() + grace_s
        for part in self.parts if parts is None else parts:
            if not part.is_open or (part.kill_at is not None and part.kill_at <= kill_at):
                continue
            if part.order is None:
                part.order = StopOrder(self._clock.time_ns(), part.torchrun_death(self.run))
            part.kill_at = kill_at
            part.link.stop(cause, grace_s)

    def give_up(self, timing: LaunchTiming) -> None:
        """No longer wait for nodes that were to have ended long ago; what cannot be heard by then is lost."""
        for part in self.parts:
            is_mute = part.is_mute and part.status.heard_s > timing.mute_s
            patience_s = 0.0 if is_mute else timing.kill_s
            if part.is_open and part.kill_at is not None and self._clock.monotonic() > part.kill_at + patience_s:
                why = f" ({part.status.problem})" if part.status.problem else ""
                part.given_up = f"it did not end in time{why}"
                if part.status.problem:
                    part.lose(part.silence, self._clock)

    def abandon(self, timing: LaunchTiming) -> None:
        """Have everything killed, in bounded time, whatever else goes wrong."""
        deadline = self._clock.monotonic() + timing.kill_s
        for part in self.parts:
            with contextlib.suppress(Exception):
                part.look(self._clock.monotonic())
                self.stop("exception", 0.0, [part])
        while self._clock.monotonic() < deadline and any(part.is_open for part in self.parts):
            self._clock.sleep(timing.poll_s)
            for part in self.parts:
                with contextlib.suppress(Exception):
                    part.look(self._clock.monotonic())
