"""What becomes of a run: that it makes no steps any more, has every rank write down where it is and is ended in the
end; and how it ended, from what its nodes left behind to one verdict, with place, memory and advice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.folder import NodeFiles, read_json
from cluster.control.attempt import tail_text, torchrun_log
from cluster.control.fleet import Fleet, Part, kill_facts
from cluster.control.hang_blame import RankEvidence, find_culprit
from cluster.control.link import INTERRUPTED, Clock, LaunchOutcome, LaunchTiming
from cluster.failure import Failure, NodeEvidence, find_failure
from cluster.plan import LaunchPlan, roots_of
from cluster.remote_text import integer, number, table, word
from cluster.ssh.hosts import fold_nodes, node_command
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.checkpoints import MANIFEST_FILE, checkpoints_folder, list_checkpoints
from engine.runs.files import JsonLinesTail
from engine.runs.folder import RunFolder, typed_overrides
from engine.runs.oom import less_memory_text
from engine.runs.record import resolved_config

DIAGNOSE_S = 30.0  # without any advance, or so many of the slowest steps: then ranks are asked where they are
SLOW_STEPS = 5.0
KILL_S = 10 * 60.0  # as long as NCCL itself waits: a stall may pass
LONG_DIAGNOSE_S = 15 * 60.0  # before the first step, after the last, and where no steps are made
LONG_KILL_S = 60 * 60.0  # as long as the ranks wait for each other
STOPPED_S = 10.0  # a rank that somebody stopped does not come back by itself
TRAINING_PHASE = "train"
_FLIGHT_S = 3.0  # for flight records: ranks look for a request five times a second, and what they write is copied
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
        self._is_reported = self._is_last = False
        self._nonce = ""
        self._requested_at: float | None = None
        self._stopped: dict[str, tuple[int, str | None]] = {}

    def poll(self, timing: LaunchTiming) -> Failure | None:
        """The failure; None while the run goes on, may still go on, or its ranks are still reporting."""
        self._note_stopped()
        silence_s, (diagnose_s, kill_s) = self._steps.silence_s, self._limits_s()
        if silence_s <= diagnose_s:
            self._requested_at, self._is_reported, self._is_last = None, False, False  # it only took its time
            return None
        is_over = silence_s > kill_s
        if self._requested_at is None or (is_over and not self._is_last):  # in the end once more, for how it stands now
            self._requested_at, self._nonce, self._is_last = self._clock.monotonic(), secrets.token_hex(8), is_over
            for part in self._fleet.parts:
                part.link.request_stacks(self._nonce)
            return None
        asked_s = self._clock.monotonic() - self._requested_at
        # What ranks wrote has some time to come here, those of a node that gives no answer some more.
        have_reported = asked_s > _FLIGHT_S and all(self._answer(part) is not None for part in self._fleet.parts)
        if asked_s < timing.stacks_s and not have_reported:
            return None
        if is_over:
            return self._accuse()
        if not self._is_reported:
            self._is_reported = True
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


# --- the verdict ------------------------------------------------------------------------------------------------------


CONTROLLER_CAUSES = frozenset(
    {"failure", "hang", "node lost", "start", "completed", "exception"}
)  # why a controller stops
_WEAK_KINDS = ("peer_lost", "launcher", "exit")  # what ranks show whose launcher is gone


def judge(
    fleet: Fleet, failure: Failure | None = None, *, cancelled: bool = False, is_orphan: bool = False
) -> LaunchOutcome:
    """The outcome of a run whose nodes have all ended, or were given up.

    failure: what its controller itself found. cancelled: it was asked to stop the run. is_orphan: there was none.
    """
    leftover, state = fleet.leftover, fleet.run.read_state()["state"]
    if state == "completed":
        return LaunchOutcome("completed", 0, leftover=leftover)
    found = failure or next((one.status.failure for one in fleet.parts if one.status.failure), None)
    # Ranks, or somebody on the nodes, may have ended the run on purpose, if nothing failed before.
    causes = {str(word(one.status.outcome, "stop_cause")) for one in _with_cause(fleet, "stop")}
    was_cancelled = (state == "cancelled" or bool(causes - CONTROLLER_CAUSES)) and not fleet.run.rank_errors()
    if found is None and (cancelled or was_cancelled):
        return LaunchOutcome("cancelled", INTERRUPTED, leftover=leftover)
    failure = complete(found or _find(fleet, is_orphan=is_orphan), fleet)
    return LaunchOutcome(failure.status, failure.exit_code, failure, leftover)


def complete(failure: Failure, fleet: Fleet) -> Failure:
    """`failure` with its place, its log, memory beside what was predicted, the last checkpoint, and advice."""
    failure = _located(failure, fleet)
    if failure.kind == "oom":
        failure = replace(failure, memory=_compared(failure, fleet))
    failure = replace(failure, checkpoint=last_checkpoint(fleet.run, fleet.plan))
    return replace(failure, advice=advice(failure, fleet.run.path, fleet.plan.config))


def last_checkpoint(run: RunFolder, plan: LaunchPlan) -> str | None:
    """The checkpoint of the most steps that was committed: its folder here, or that on the run's nodes; or None."""
    known = list_checkpoints(checkpoints_folder(plan.config.train.checkpoint, run.path))
    here = next((checkpoint for checkpoint in known if (checkpoint.path / MANIFEST_FILE).exists()), None)
    told = max(run.saved_steps(), default=0)
    if not plan.has_separate_folders or told <= (0 if here is None else here.step):
        return None if here is None else str(here.path)
    root = roots_of(plan)[plan.nodes[0].name]
    return f"{root}/step-{told:08d} on {fold_nodes([node.name for node in plan.nodes])}"


def _find(fleet: Fleet, *, is_orphan: bool) -> Failure:
    if refused := _with_cause(fleet, "start_failed"):
        text = word(refused[0].status.outcome, "error", 1000) or "the command could not be started"
        return Failure("start", "StartFailed", text, host=refused[0].name)
    if is_orphan and not any(one.lost or one.status.outcome for one in fleet.parts):
        return Failure("launcher", "LauncherLost", "the launcher was gone before any node had begun")
    failure = find_failure([_evidence(one) for one in fleet.parts])
    waited = [one.name for one in _with_cause(fleet, "lease")]
    if waited and failure.kind in _WEAK_KINDS and failure.signal is None:
        text = (
            f"the launcher was gone for {fleet.plan.config.cluster.lease_s:g} s, so these nodes stopped their ranks: "
        )
        return Failure("launcher", "LauncherLost", text + ", ".join(waited))
    return failure


def _evidence(part: Part) -> NodeEvidence:
    """What a node shows; what came of our own request to stop is left out or marked as an echo."""
    outcome, stopped_ns, death = part.status.outcome, part.stopped_ns, part.torchrun_death
    if stopped_ns is None and word(outcome, "cause") in ("stop", "lease"):  # by the node, or who led the run before
        at_ns = integer(outcome, "stop_at_ns")
        stopped_ns = None if at_ns is None else at_ns - part.status.clock_offset_ns
    seen = {one.rank: one for one in part.deaths if stopped_ns is None or (one.at_ns or stopped_ns) < stopped_ns}
    if stopped_ns is not None and (death is None or death.rank not in seen):
        death = part.death_before  # what it says after it was asked to stop may be our doing
    if death is not None and death.rank in seen:
        death = replace(death, at_ns=seen[death.rank].at_ns, kill=seen[death.rank].kill)
    errors = []
    for error in part.errors:
        is_late = stopped_ns is not None and (error["time_ns"] or 0) > stopped_ns
        errors.append({**error, "is_echo": is_late or error.get("kind") == "peer_lost"})
    return NodeEvidence(
        part.name,
        errors,
        death,
        list(seen.values()),
        integer(outcome, "exit_code") if word(outcome, "cause") == "exit" else None,
        kill_facts(table(outcome, "memory")),
        part.lost,
        None if part.lost is None else part.lost_ns,
        part.torchrun_text,
    )


def _with_cause(fleet: Fleet, cause: str) -> list[Part]:
    """The nodes that say that their part ended so."""
    return [one for one in fleet.parts if word(one.status.outcome, "cause") == cause]


def _located(failure: Failure, fleet: Fleet) -> Failure:
    """`failure` with node, log and, where the rank could not say, the last step and phase the run recorded."""
    nodes = fleet.plan.nodes
    node = next((node for node in nodes if node.name == failure.host), nodes[0])
    host = failure.host or (node.name if len(nodes) == 1 else None)
    log = torchrun_log(node, fleet.run)
    if failure.rank is not None and (rank_log := fleet.run.log_path(node.name, failure.rank)).exists():
        log = rank_log
    step, phase = failure.step, failure.phase
    if step is None and phase is None:
        step = next((row["step"] for row in reversed(fleet.run.read_metrics()) if "step" in row), None)
        if step is None:
            events = (event for event in reversed(fleet.run.read_events()) if event.get("kind") == "phase")
            phase = next((str(event.get("phase")) for event in events), None)
    return replace(failure, host=host, log=failure.log or str(log), step=step, phase=phase)


def _compared(failure: Failure, fleet: Fleet) -> dict[str, Any]:
    """The memory of a failure beside the limit of the host and what memory_plan.json predicted for one rank."""
    memory = failure.memory or {}
    where = memory.get("where", "host")
    plan = read_json(str(fleet.run.path / "memory_plan.json")) or {}
    # On a CPU run the device is the host: what is predicted there is the device's peak.
    on_device = where == "device" or fleet.plan.config.cluster.backend == "gloo"
    capacity = memory.get("capacity_bytes")
    status = next((one.status for one in fleet.parts if one.name == failure.host), None)
    if not capacity and where == "host" and status is not None:  # as its supervisor last measured it
        killed = table(table(status.outcome, "memory"), "memory")
        capacity = integer(killed, "capacity_bytes") or integer(status.health, "memory_limit_bytes")
    predicted = plan.get("device_peak_bytes" if on_device else "host_peak_bytes")
    return {**memory, "where": where, "capacity_bytes": capacity, "predicted_peak_bytes": predicted}


def _what_ran(run_path: Path, config: RunConfig) -> RunConfig:
    """`config` as it was resolved for the ranks, whose memory policy matters; as it is, where that cannot be read."""
    try:
        return resolved_config(run_path)
    except ConfigError:
        return config


def advice(failure: Failure, run_path: Path, config: RunConfig) -> str:
    """What to do next; `run_path` is the run folder."""
    log = failure.log or "the log"
    resume = f"burst resume {shlex.quote(run_path.name)}"
    again = f"`{resume}` starts the same ranks again."
    if any(os.strerror(code) in failure.message for code in (errno.ENOSPC, errno.EDQUOT)):
        return f"Free space where the message says; then `{resume}` goes on from the last checkpoint."
    if failure.type.rpartition(".")[2] == "CheckpointError":
        return f"Remove the reason that the message names; then `{resume}` goes on from the newest whole checkpoint."
    match failure.kind:
        case "config" | "user":
            return "Correct the setting or file that the message names and launch again."
        case "oom":
            is_device = failure.memory is not None and failure.memory.get("where") == "device"
            return less_memory_text(_what_ran(run_path, config), "device" if is_device else "host")
        case "signal" if failure.signal == "SIGKILL":
            text = less_memory_text(_what_ran(run_path, config), "host")
            remedy = f"{text[0].lower()}{text[1:]}"
            return f"If `dmesg` shows that the kernel ran out of memory, {remedy} If not, ask who sent the signal."
        case "peer_lost":
            return f"The rank that it lost said nothing: compare the logs beside {log}."
        case "hang":
            return f"Read where every rank was in {failure.stacks or log} and beside it; {again}"
        case "node_lost":
            check = node_command(failure.host or "", "check-nodes", overrides=typed_overrides(run_path))
            return f"See what is left of the node with `{check}`; {again} On other nodes: `{resume} --hosts NODES`."
        case "port":
            chosen = "a free port is chosen, unless cluster.master_port names one"
            return f"See who listens there with `ss -ltnp`, and launch again: {chosen}."
        case "start":
            return f"Remove the reason that the message names; {again}"
        case "launcher":
            return f"Read {log}; {again}"
        case _:
            return f"The whole traceback is in {log}; {again}"
