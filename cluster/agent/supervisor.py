"""The owner of one run on one node: starts its command, watches it, stops it, and leaves no process behind.

It hears of the world by files of the run folder alone (`folder.py`), so it survives launchers, sessions and agents.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Callable, Optional

from cluster.agent.folder import Document, NodeFiles, now_text, read_json, write_json
from cluster.agent.health import Health, Stacks
from cluster.agent.memory import MemoryWatch
from cluster.agent.messages import RANK_LOGS_VARIABLE, Spec, SpecError, seconds
from cluster.agent.processes import (
    NODE_VARIABLE,
    RUN_ID_VARIABLE,
    Family,
    Helpers,
    Marks,
    become_subreaper,
    die_with_parent,
    process_start,
)

_TURN_S = 0.1
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
        self.by: Optional[str] = None
        self.asked_ns: Optional[int] = None
        self.deadline = 0.0
        self.killed_at: Optional[float] = None

    def ask(self, cause: str, by: str, grace_s: float) -> bool:
        """Note a request; whether it is the first."""
        deadline = time.monotonic() + grace_s
        is_first = not self.cause
        if is_first:
            self.cause, self.by, self.asked_ns = cause, by, time.time_ns()
        self.deadline = deadline if is_first else min(self.deadline, deadline)
        return is_first


class Supervisor:
    """One run on this node, from its first to its last moment. Must run in the main thread of its process."""

    def __init__(self, spec: Spec, memory: Optional[MemoryWatch] = None) -> None:
        self.spec, self.files = spec, NodeFiles(spec.folder, spec.node)
        self.helpers = Helpers()
        ranks = range(spec.first_rank, spec.first_rank + spec.local_ranks)
        marks, is_contained = Marks(spec.run_id, spec.node), spec.container is not None
        self.family = Family(marks, ranks, self.helpers.pids, is_contained)
        self.stop = StopOrder()
        self.container: Optional[Container] = None
        if spec.container is not None:
            self.container = Container(spec.engine, spec.container, spec.run_id, self.helpers)
        self.memory = memory or MemoryWatch()
        self.health = Health(self.files, self.helpers)
        self.stacks = Stacks(self.files)
        self._inquests: list[Document] = []
        self._phase = "starting"
        self._signals: list[int] = []
        self._stop_stamp: Any = None
        self._lease_stamp: Any = None
        self._beat_at = time.monotonic()
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "pid_start": process_start(os.getpid())}
        self._written: Document = {}
        self._next_write = self._retry_at = 0.0

    def announce(self) -> None:
        """Write supervisor.json, by which everybody finds this process."""
        self._tell()

    def run(self) -> Document:
        """What outcome.json says once the run has ended here; it is written."""
        become_subreaper()
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self._signals.append(number))
        self._beat_at = time.monotonic()
        try:
            child = self._start()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return self._finish(None, _why(self.spec.argv[0], self.spec.cwd, error))
        self.family.watch_child(child.pid)
        self._phase = "running"
        self._tell()
        self.health.start()
        try:
            return self._finish(self._watch(child), None)
        except Exception as error:  # of our own: nothing may be left running for it, and somebody must hear of it
            traceback.print_exc()
            return self._finish(child.poll(), f"the supervisor failed: {type(error).__name__}: {error}", "exit")

    def _start(self) -> "subprocess.Popen[bytes]":
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

    def _watch(self, child: "subprocess.Popen[bytes]") -> int:
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
            self.stacks.turn(_stamp(self.files.stacks), self.health.ranks)
            self._tell()
            self.family.wait(_TURN_S)

    def _inquire(self) -> None:
        """Ask why a rank died while the kernel's counters are still there."""
        for death in self.family.deaths[len(self._inquests) :]:
            self._inquests.append(self.memory.facts(death.pid))

    def _hear(self) -> None:
        """Signals, stop requests and the lease."""
        while self._signals:
            number = self._signals.pop(0)
            self._ask("stop", signal.Signals(number).name, self.spec.stop_grace_s)
        stamp = _stamp(self.files.stop)
        if stamp is not None and stamp != self._stop_stamp:
            self._stop_stamp = stamp
            request = read_json(self.files.stop) or {}
            try:
                grace = seconds(request.get("grace_s"), "grace_s")
            except SpecError:
                grace = self.spec.stop_grace_s
            self._ask("stop", str(request.get("cause", ""))[:200], grace)
        if self.spec.lease_s is not None:
            stamp, now = _stamp(self.files.lease), time.monotonic()
            if stamp != self._lease_stamp:
                # Only that it changed counts, and this machine's clock: that of whoever beats may differ.
                self._lease_stamp, self._beat_at = stamp, now
            elif now > self._beat_at + self.spec.lease_s:
                self._ask("lease", "no word from the launcher", self.spec.stop_grace_s)

    def _ask(self, cause: str, by: str, grace_s: float) -> None:
        if not self.stop.ask(cause, by, grace_s):
            return
        self._phase = "stopping"
        self._say(f"stopping ({cause}: {by}), grace {grace_s:g} s")
        self.family.refresh(full=True)
        if grace_s > 0:
            self._ask_processes(grace_s)

    def _ask_processes(self, grace_s: float) -> None:
        """SIGTERM to all at once: a rank that torchrun tells later would wait for one that has already left."""
        if self.container is not None:
            self.container.stop(grace_s)
            self.family.signal(signal.SIGTERM, spare={self.family.child})
        else:
            self.family.signal(signal.SIGTERM)

    def _enforce(self) -> None:
        """After the grace: kill all but the command, which may still say how its ranks ended, then that as well."""
        now = time.monotonic()
        if not self.stop.cause or now < self.stop.deadline:
            return
        if self.stop.killed_at is None:
            self.stop.killed_at = now
            self._say("killing what is left")
            if self.container is not None:
                self.container.kill()
        self.family.refresh(full=True)
        is_patient = now < self.stop.killed_at + _REPORT_GRACE_S
        self.family.signal(signal.SIGKILL, spare={self.family.child} if is_patient else set())

    def _finish(self, code: Optional[int], problem: Optional[str], cause: str = "start_failed") -> Document:
        """The outcome, once nothing of the run is left; `problem`: why there is no regular end, of kind `cause`."""
        self.health.close()
        if code is not None:
            self.family.forget_child()
        leftover = self.family.kill_until_gone(signal.SIGKILL, _KILL_WAIT_S)
        self._inquire()
        container_problem = ""
        if self.container is not None:
            # A client that was killed may leave an engine that is still making its container.
            container_problem = self.container.remove(_CONTAINER_WAIT_S, 1.0 if code is None or code < 0 else 0.0)
        outcome = {
            "exit_code": code,
            "cause": cause if problem is not None else self.stop.cause or "exit",
            "stop_cause": self.stop.by,
            "stop_at_ns": self.stop.asked_ns,
            "error": problem or container_problem or None,
            "deaths": self._deaths(),
            "memory": self._kill_facts(),
            "leftover_pids": leftover,
        }
        if self._phase != "starting":  # what never ran is not to look as if it had, for as long as its outcome takes
            self._phase = "ended"
        self._tell(force=True)
        self._write_outcome(outcome)
        return outcome

    def _deaths(self) -> list[Document]:
        """The ranks that ended, in that order, each with what is known should SIGKILL have done it."""
        return [dict(death._asdict(), memory=facts) for death, facts in zip(self.family.deaths, self._inquests)]

    def _kill_facts(self) -> Document:
        """What is known of a rank that SIGKILL may have ended, the first with evidence, or of the command."""
        deaths = zip(self.family.deaths, self._inquests)
        killed = [facts for death, facts in deaths if death.exit_code in (None, -signal.SIGKILL)]
        certain = [facts for facts in killed if facts["evidence"] is not None]
        return (certain or killed or [self.memory.facts(None)])[0]

    def _write_outcome(self, outcome: Document) -> None:
        """Write it, however long the disk is full: without it the run would count as lost."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                write_json(self.files.outcome, outcome, sync=True)
                return
            except OSError as error:
                self._say(f"cannot write the outcome: {error}")
                if error.errno not in _PASSING and time.monotonic() > give_up_at:
                    return
            if self._signals or not os.path.isdir(self.files.state_dir):
                return
            time.sleep(_RETRY_S)

    def _tell(self, force: bool = False) -> None:
        """Write supervisor.json when something in it changed, and every two seconds."""
        document = {
            "run_id": self.spec.run_id,
            **self._identity,
            "phase": self._phase,
            "ranks": {str(rank.rank): rank.pid for rank in self.family.living_ranks()},
            "deaths": [death._asdict() for death in self.family.deaths],
            "stop_cause": self.stop.by,
        }
        now = time.monotonic()
        is_news = document != self._written
        if not force and now < (self._retry_at if is_news else self._next_write):
            return
        try:
            write_json(self.files.supervisor, {**document, "updated_at": now_text()})
        except OSError:
            self._retry_at = now + _RETRY_S  # a full disk: the processes are owned all the same
        else:
            self._written, self._next_write = document, now + _UPDATE_S

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"{now_text()} {text}", file=sys.stderr, flush=True)


def refusal(text: str) -> Document:
    """The outcome of a run that was never started here, in the form of every other."""
    nothing = {"evidence": None, "hint": None, "memory": None}
    return {
        **{"exit_code": None, "cause": "start_failed", "stop_cause": None, "stop_at_ns": None, "error": text},
        **{"deaths": [], "memory": nothing, "leftover_pids": []},
    }


def _stamp(path: str) -> Optional[Any]:
    """What changes when a file is touched or replaced; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        return (status.st_mtime_ns, status.st_size, status.st_ino)
    finally:
        os.close(descriptor)


def _why(program: str, cwd: str, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and not os.path.isdir(cwd):
        return f"the folder {cwd} to start in is not there"
    return "cannot start {}: {}".format(program, getattr(error, "strerror", None) or error)


_TIMEOUT_S = 20.0


class Container:
    """Container `name`, which belongs to the run only if one of its labels is the run id."""

    def __init__(self, engine: Sequence[str], name: str, run_id: str, helpers: Optional[Helpers] = None) -> None:
        self._engine, self.name, self._run_id = list(engine), name, run_id
        self._helpers = helpers or Helpers()

    def stop(self, grace_s: float) -> None:
        """Ask it to end, in the background."""
        seconds = max(1, int(grace_s))
        self._later(lambda: self._act(["stop", "-t", str(seconds), self.name], seconds + _TIMEOUT_S))

    def kill(self) -> None:
        """End it now, in the background."""
        self._later(lambda: self._act(["kill", self.name], _TIMEOUT_S))

    def remove(self, wait_s: float, sure_s: float = 0.0) -> str:
        """Remove it, running or not; what stands in the way, "" when it is gone.

        `sure_s`: so long it may still appear, made by an engine whose client was killed.
        """
        begin = time.monotonic()
        while True:
            passed = time.monotonic() - begin
            ours = self.is_ours(min(wait_s, _TIMEOUT_S))
            if ours is False and passed >= sure_s:
                return ""
            if ours and self._call(["rm", "-f", self.name], _TIMEOUT_S) == 0:
                return ""
            if passed > wait_s:
                return f"the engine did not remove container {self.name}"
            time.sleep(0.3)

    def is_ours(self, timeout_s: float = _TIMEOUT_S) -> Optional[bool]:
        """Whether there is such a container with our label; None when the engine does not say."""
        words = ["container", "inspect", "--format", "{{json .Config.Labels}}", self.name]
        try:
            done = self._helpers.run(self._engine + words, timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            text = done.stderr.decode("utf-8", "replace").lower()
            return False if "no such container" in text else None
        with contextlib.suppress(ValueError):
            labels = json.loads(done.stdout.decode("utf-8", "replace"))
            return isinstance(labels, dict) and self._run_id in labels.values()
        return None

    def _act(self, words: list[str], timeout_s: float) -> None:
        if self.is_ours():
            self._call(words, timeout_s)

    def _call(self, words: list[str], timeout_s: float) -> Optional[int]:
        try:
            return self._helpers.run(self._engine + words, timeout_s).returncode
        except (OSError, subprocess.TimeoutExpired):
            return None

    def _later(self, act: Callable[[], object]) -> None:
        thread = threading.Thread(target=act, name="container")
        thread.daemon = True
        thread.start()
