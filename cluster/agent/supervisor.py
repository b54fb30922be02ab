"""The owner of one run on one node: starts its command, watches it, stops it, and leaves no process behind.

It hears of the world by files of the run folder alone (`folder.py`), so it survives launchers, sessions and agents.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

from cluster.agent.container import Container
from cluster.agent.folder import Document, NodeFiles, now_text, read_json, stamp_of, write_json
from cluster.agent.health import Health, Stacks
from cluster.agent.memory import MemoryWatch
from cluster.agent.messages import RANK_LOGS_VARIABLE, Spec, SpecError, seconds
from cluster.agent.processes import (
    Family,
    Helpers,
    ProcessLabels,
    become_subreaper,
)
from engine.runs.process import NODE_VARIABLE, RUN_ID_VARIABLE, die_with_parent, process_start

_POLL_S = 0.1
_UPDATE_S = 2.0
_RETRY_S = 0.5  # when the disk is full
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # somebody may make room; nobody mends the rest while we wait
_PATIENCE_S = 60.0
_REPORT_GRACE_S = 2.0  # for torchrun to say how its ranks ended, once they are killed
_KILL_WAIT_S = 10.0
_CONTAINER_WAIT_S = 20.0
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopOrder:
    """Whether and how the run is being stopped. Later requests may shorten the grace, never lengthen it."""

    def __init__(self) -> None:
        self.cause = ""  # exit, stop or lease: as outcome.json names it; "" while nobody asked
        self.by: str | None = None
        self.requested_ns: int | None = None
        self.deadline = float("inf")
        self.killed_at: float | None = None

    def ask(self, cause: str, by: str, grace_s: float) -> bool:
        """Note a request; whether it is the first."""
        is_first = not self.cause
        if is_first:
            self.cause, self.by, self.requested_ns = cause, by, time.time_ns()
        self.deadline = min(self.deadline, time.monotonic() + grace_s)
        return is_first


class Supervisor:
    """One run on this node, from its first to its last moment. Must run in the main thread of its process."""

    def __init__(self, spec: Spec, memory: MemoryWatch | None = None) -> None:
        self.spec, self.files = spec, NodeFiles(spec.folder, spec.node)
        self.helpers = Helpers()
        ranks = range(spec.first_rank, spec.first_rank + spec.local_ranks)
        is_contained = spec.container is not None
        self.family = Family(ProcessLabels(spec.run_id, spec.node), ranks, self.helpers.pids, is_contained)
        self.stop = StopOrder()
        self.container = container_of(spec, self.helpers)
        self.memory = memory or MemoryWatch()
        self.health = Health(self.files, self.helpers)
        self.stacks = Stacks(self.files)
        self._deaths: list[Document] = []
        self._phase = "starting"
        self._signals: list[int] = []
        self._stop_stamp: Any = None
        self._lease_stamp: Any = None
        self._heartbeat_at = time.monotonic()
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": process_start(os.getpid())}
        self._written: Document = {}
        self._next_write = 0.0

    def run(self) -> Document:
        """What outcome.json says once the run has ended here; it is written."""
        become_subreaper()
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self._signals.append(number))
        self._heartbeat_at = time.monotonic()
        try:
            child = self._start()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return self._finish(None, "start_failed", _why(self.spec, error))
        self.family.watch_child(child.pid)
        self._phase = "running"
        self.tell()
        self.health.start()
        try:
            return self._finish(self._watch(child), self.stop.cause or "exit")
        except Exception as error:  # of our own: nothing may be left running for it, and somebody must hear of it
            traceback.print_exc()
            return self._finish(child.poll(), "exit", f"the supervisor failed: {type(error).__name__}: {error}")

    def tell(self) -> None:
        """Write supervisor.json, by which everybody finds this process, when it has news, and every two seconds."""
        document = {
            "run_id": self.spec.run_id,
            **self._identity,
            "phase": self._phase,
            "ranks": {str(rank.rank): rank.pid for rank in self.family.living_ranks()},
            "deaths": list(self._deaths),
            "stop_cause": self.stop.by,
        }
        if document != self._written or time.monotonic() > self._next_write:
            with contextlib.suppress(OSError):  # a full disk: the processes are owned all the same
                write_json(self.files.supervisor, {**document, "updated_at": now_text()})
                self._written, self._next_write = document, time.monotonic() + _UPDATE_S

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self.spec
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        environment[RANK_LOGS_VARIABLE] = self.files.log_dir
        environment.update(spec.environment)
        environment.update({RUN_ID_VARIABLE: spec.run_id, NODE_VARIABLE: spec.node})
        me = os.getpid()

        def prepare() -> None:
            # Whoever kills this supervisor ends the command, and its ranks with it: nobody else would.
            die_with_parent()
            if os.getppid() != me:
                os._exit(1)

        with open(self.files.torchrun_log, "ab") as log:
            return subprocess.Popen(
                list(spec.argv),
                cwd=spec.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,  # no other thread runs yet
            )

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """The exit code of the command (negative: its signal), once it has ended."""
        while True:
            code = child.poll()
            self.family.refresh()
            self._inquire()
            if code is not None:
                return code
            self._hear()
            self._enforce()
            self.memory.sample(self.family.members())
            self.health.ranks = self.family.living_ranks()
            self.stacks.turn(stamp_of(self.files.stacks), self.health.ranks)
            self.tell()
            self.family.wait(_POLL_S)

    def _inquire(self) -> None:
        """Ask why a rank died, should SIGKILL have done it, while the kernel's counters are still there."""
        for death in self.family.deaths[len(self._deaths) :]:
            self._deaths.append({**death._asdict(), "memory": self.memory.facts(death.pid)})

    def _hear(self) -> None:
        """Signals, stop requests and the lease."""
        while self._signals:
            self._ask("stop", signal.Signals(self._signals.pop(0)).name, self.spec.stop_grace_s)
        stamp = stamp_of(self.files.stop)
        if stamp is not None and stamp != self._stop_stamp:
            self._stop_stamp = stamp
            request = read_json(self.files.stop) or {}
            try:
                grace_s = seconds(request.get("grace_s"), "grace_s")
            except SpecError:
                grace_s = self.spec.stop_grace_s
            self._ask("stop", str(request.get("cause", ""))[:200], grace_s)
        if self.spec.lease_s is not None:
            stamp, now = stamp_of(self.files.lease), time.monotonic()
            if stamp != self._lease_stamp:
                # Only that it changed counts, and this machine's clock: that of whoever beats may differ.
                self._lease_stamp, self._heartbeat_at = stamp, now
            elif now > self._heartbeat_at + self.spec.lease_s:
                self._ask("lease", "no word from the launcher", self.spec.stop_grace_s)

    def _ask(self, cause: str, by: str, grace_s: float) -> None:
        """SIGTERM to all at once: a rank that torchrun tells later would wait for one that has already left."""
        if not self.stop.ask(cause, by, grace_s):
            return
        self._phase = "stopping"
        _say(f"stopping ({cause}: {by}), grace {grace_s:g} s")
        self.family.refresh(full=True)
        if grace_s > 0 and self.container is not None:
            self.container.stop(grace_s)
        if grace_s > 0:
            self.family.signal(signal.SIGTERM, spare=() if self.container is None else (self.family.child,))

    def _enforce(self) -> None:
        """After the grace: kill all but the command, which may still say how its ranks ended, then that as well."""
        now = time.monotonic()
        if now < self.stop.deadline:
            return
        if self.stop.killed_at is None:
            self.stop.killed_at = now
            _say("killing what is left")
            if self.container is not None:
                self.container.kill()
        self.family.refresh(full=True)
        allow_slow = now < self.stop.killed_at + _REPORT_GRACE_S
        self.family.signal(signal.SIGKILL, spare=(self.family.child,) if allow_slow else ())

    def _finish(self, code: int | None, cause: str, problem: str | None = None) -> Document:
        """The outcome, once nothing of the run is left; `problem`: why there is no regular end."""
        self.health.close()
        if code is not None:
            self.family.remove_child()
        leftover = self.family.kill_all(signal.SIGKILL, _KILL_WAIT_S)
        self._inquire()
        if self.container is not None:
            # A client that was killed may leave an engine that is still making its container.
            left = self.container.remove(_CONTAINER_WAIT_S, 1.0 if code is None or code < 0 else 0.0)
            problem = problem or left or None
        outcome = {
            **refusal(problem),
            **{"exit_code": code, "cause": cause, "stop_cause": self.stop.by, "stop_at_ns": self.stop.requested_ns},
            **{"deaths": self._deaths, "memory": self._kill_facts(), "leftover_pids": leftover},
        }
        if self._phase != "starting":  # what never ran is not to look as if it had, for as long as its outcome takes
            self._phase = "ended"
        self.tell()
        self._write_outcome(outcome)
        return outcome

    def _kill_facts(self) -> Document:
        """What is known of a rank that SIGKILL may have ended, the first with evidence, or of the command."""
        killed = [death["memory"] for death in self._deaths if death["exit_code"] in (None, -signal.SIGKILL)]
        certain = [facts for facts in killed if facts["evidence"] is not None]
        facts: list[Document] = certain or killed or [self.memory.facts(None)]
        return facts[0]

    def _write_outcome(self, outcome: Document) -> None:
        """Write it, however long the disk is full: without it the run would count as lost."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return write_json(self.files.outcome, outcome, sync=True)
            except OSError as error:
                _say(f"cannot write the outcome: {error}")
                is_hopeless = error.errno not in _PASSING and time.monotonic() > give_up_at
            if is_hopeless or self._signals or not os.path.isdir(self.files.state_dir):
                return None
            time.sleep(_RETRY_S)


def container_of(spec: Spec, helpers: Helpers | None = None) -> Container | None:
    """That of the ranks; None: they run bare."""
    return None if spec.container is None else Container(spec.engine, spec.container, spec.run_id, helpers)


def refusal(problem: str | None) -> Document:
    """The outcome of a run that was never started here, in the form of every other."""
    nothing = {"evidence": None, "hint": None, "memory": None}
    return {
        **{"exit_code": None, "cause": "start_failed", "stop_cause": None, "stop_at_ns": None, "error": problem},
        **{"deaths": [], "memory": nothing, "leftover_pids": []},
    }


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"{now_text()} {text}", file=sys.stderr)


def _why(spec: Spec, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and not os.path.isdir(spec.cwd):
        return f"the folder {spec.cwd} to start in is not there"
    return f"cannot start {spec.argv[0]}: {getattr(error, 'strerror', None) or error}"
