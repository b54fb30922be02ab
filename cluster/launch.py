"""The executor of a `LaunchPlan` on this machine: start, watch, stop, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from cluster.failure import Failure, advice, find_failure, first_death
from cluster.memory_watch import MemoryWatch
from cluster.plan import LaunchPlan, NodePlan
from cluster.processes import kill_run, run_processes, signal_processes
from engine.errors import RunError
from engine.run.process import die_with_parent
from engine.run.records import read_json_object
from engine.runs import FINAL_STATES, RunFolder

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
_LOG_TAIL_BYTES = 256 * 1024


class LaunchObserver(Protocol):
    """Whoever shows a launch to a person."""

    def tick(self) -> None:
        """Called several times a second while the run lives."""

    def stopping(self, cause: str, grace_s: float) -> None:
        """The run is being stopped; after `grace_s` seconds what remains is killed."""


@dataclass(frozen=True)
class LaunchTiming:
    """How long things may take, in seconds."""

    poll_s: float = 0.1
    stop_grace_s: float = 12.0  # between asking the ranks to stop and killing them; ranks allow themselves 10
    failure_grace_s: float = 3.0  # between the first error of a rank and killing the ranks that go on
    report_grace_s: float = 5.0  # for torchrun to say how its ranks ended, once they are killed


@dataclass(frozen=True)
class LaunchOutcome:
    """How a run ended: final state, exit code for the shell, the first failure, and what could not be cleared away."""

    status: str
    exit_code: int
    failure: Failure | None = None
    leftover_pids: tuple[int, ...] = ()


class StopRequests:
    """Counts the stop signals this process received while `listening()`; the first one's name is kept."""

    def __init__(self) -> None:
        self.count = 0
        self.cause = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; the former handlers return at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may set handlers
            return
        former = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.cause = self.cause or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


def launch_local(
    plan: LaunchPlan,
    run: RunFolder,
    observer: LaunchObserver,
    stop: StopRequests,
    timing: LaunchTiming = LaunchTiming(),
    memory: MemoryWatch | None = None,
) -> LaunchOutcome:
    """Run the one node of `plan` in the foreground; the outcome, also written to run.json.

    The run folder holds the plan's files already. Whatever happens here, an exception of the observer included, no
    process of the run is left when this returns. Raises RunFolderError when the run folder cannot be written.
    `memory` watches host memory; None: by this machine's procfs.
    """
    if len(plan.nodes) != 1:
        raise RunError(f"launch_local runs one node, but the plan has {len(plan.nodes)}.")
    run.transition("starting", world_size=plan.world_size, backend=plan.backend.name)
    if stop.count:
        return _finish(run, LaunchOutcome("cancelled", INTERRUPTED))
    watch = _Watch(plan, run, observer, stop, timing, memory or MemoryWatch())
    try:
        exit_code = watch.until_end()
    except BaseException as error:
        kill_run(run.run_id)
        failure = Failure("launcher", type(error).__name__, str(error))
        _finish(run, LaunchOutcome("cancelled", INTERRUPTED) if stop.count else LaunchOutcome("failed", 1, failure))
        raise
    leftover = kill_run(run.run_id)
    return _finish(run, replace(_judge(watch, exit_code), leftover_pids=tuple(leftover)))


class _Watch:
    """One started command, from its first to its last moment."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: RunFolder,
        observer: LaunchObserver,
        stop: StopRequests,
        timing: LaunchTiming,
        memory: MemoryWatch,
    ) -> None:
        self.config = plan.config
        self.run, self.observer, self.stop, self.timing = run, observer, stop, timing
        self.node = plan.nodes[0]
        self.log = Path(self.node.log_dir) / "torchrun.log"
        self.memory = memory
        self.pid: int | None = None
        self._stop_deadline: float | None = None
        self._failure_deadline: float | None = None

    def until_end(self) -> int:
        """The exit code of torchrun (negative: its signal), once it has ended or was killed."""
        process = start_node(self.node, self.log)
        self.pid = self.memory.root_pid = process.pid
        try:
            while process.poll() is None:
                self._react()
                self.memory.sample()
                self.observer.tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.timing.poll_s)
        finally:
            if process.poll() is None:
                kill_run(self.run.run_id, process.pid)
                process.wait()
            self.pid = None  # from here on the number may belong to someone else
        self.observer.tick()
        return process.returncode

    def _react(self) -> None:
        """Pass on a stop request and enforce it; clear away ranks that outlive a failed one."""
        now = time.monotonic()
        if self.stop.count and self._stop_deadline is None:
            self._stop_deadline = now + self.timing.stop_grace_s
            signal_processes(run_processes(self.run.run_id, self.pid), signal.SIGTERM)
            self.observer.stopping(self.stop.cause, self.timing.stop_grace_s)
        if self.stop.count > 1 or (self._stop_deadline is not None and now > self._stop_deadline):
            kill_run(self.run.run_id, self.pid)
        elif self._failure_deadline is None and self.run.rank_errors():
            self._failure_deadline = now + self.timing.failure_grace_s
        elif self._failure_deadline is not None and now > self._failure_deadline:
            # torchrun itself waits 30 s for ranks that ignore it, and only then says which one died first.
            ranks = [process for process in run_processes(self.run.run_id) if process.pid != self.pid]
            signal_processes(ranks, signal.SIGKILL)
            if now > self._failure_deadline + self.timing.report_grace_s:
                kill_run(self.run.run_id, self.pid)


def start_node(node: NodePlan, log: Path) -> subprocess.Popen[bytes]:
    """The started command of `node`: its own session, output appended to `log`, SIGTERM when this process dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **{variable.name: variable.value for variable in node.environment}}
    with log.open("ab") as output:
        return subprocess.Popen(
            node.argv,
            cwd=node.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Safe here: no other thread runs yet, and the function only makes one system call.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )


def tail_text(path: Path, size: int = _LOG_TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _judge(watch: _Watch, exit_code: int) -> LaunchOutcome:
    """The outcome from what the processes left behind."""
    state = watch.run.read_state()["state"]
    if state == "completed":
        return LaunchOutcome("completed", 0)
    if watch.stop.count or (state == "cancelled" and not watch.run.rank_errors()):
        return LaunchOutcome("cancelled", INTERRUPTED)
    death = first_death(tail_text(watch.log))
    failure = find_failure(
        watch.run.rank_errors(), death, exit_code, watch.memory.kill_facts(None if death is None else death.pid)
    )
    failure = _located(failure, watch)
    if failure.kind == "oom":
        failure = replace(failure, memory=_compared(failure.memory or {}, watch))
    failure = replace(failure, advice=advice(failure, watch.run.path, watch.config))
    return LaunchOutcome(failure.status, failure.exit_code, failure)


def _compared(memory: Mapping[str, Any], watch: _Watch) -> dict[str, Any]:
    """`memory` of a failure beside the limit of the host and what memory_plan.json predicted for one rank."""
    where = memory.get("where", "host")
    plan: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # advice must not fail over a damaged file
        plan = read_json_object(watch.run.path / "memory_plan.json") or {}
    # On a CPU run the device is the host: what is predicted there is the device's peak.
    on_device = where == "device" or watch.config.cluster.backend == "gloo"
    capacity = memory.get("capacity_bytes")
    if capacity is None and where == "host":
        capacity = watch.memory.host_memory().limit_bytes
    predicted = plan.get("device_peak_bytes" if on_device else "host_peak_bytes")
    return {**memory, "where": where, "capacity_bytes": capacity, "predicted_peak_bytes": predicted}


def _located(failure: Failure, watch: _Watch) -> Failure:
    """`failure` with host, log and, where the rank could not say, the last step and phase the run recorded."""
    host = failure.host or watch.node.hostname
    log = watch.log if failure.rank is None else watch.run.log_path(host, failure.rank)
    if not log.exists():
        log = watch.log
    step, phase = failure.step, failure.phase
    if step is None and phase is None:
        step = next((row["step"] for row in reversed(watch.run.read_metrics()) if "step" in row), None)
        if step is None:
            phases = (event.get("phase") for event in reversed(watch.run.read_events()) if event.get("kind") == "phase")
            phase = next(phases, None)
    return replace(failure, host=host, log=str(log), step=step, phase=phase)


def _finish(run: RunFolder, outcome: LaunchOutcome) -> LaunchOutcome:
    """Write the outcome to run.json; a final state that the trainer already wrote stays."""
    facts = {"exit_code": outcome.exit_code, "failure": outcome.failure.to_dict() if outcome.failure else None}
    if run.read_state()["state"] in FINAL_STATES:
        run.record(**facts)
    else:
        run.transition(outcome.status, **facts)
    return outcome
