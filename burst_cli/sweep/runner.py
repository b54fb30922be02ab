"""The executor of a sweep: every cell a launch of its own in a process of its own, at most one per lane at a time.

A lane is a set of nodes that no other lane has (or this machine). Launches die with this process, politely: each gets
SIGTERM and cancels its run. So a killed sweep leaves runs that can be taken up, and nothing that runs on unseen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from burst_cli.runs.read import run_record
from burst_cli.sweep.store import SweepFolder
from cluster.control.evidence import tail_text
from engine.config.errors import BurstError
from engine.runs.folder import FINAL_STATES, RunFolder, new_run_path
from engine.runs.process import die_with_parent
from engine.runs.records import utc_now

POLL_S = 0.2
# A launch that is killed again and again without leaving a result is not tried for ever.
MOST_LAUNCHES = 3
_MESSAGE_BYTES = 4096
# Of a run, for the table of cells.
_FIGURES = (
    "tokens_per_s_per_device",
    "mfu",
    "peak_memory_bytes",
    "final_train_loss",
    "final_validation_loss",
    "steps",
)


@dataclass(frozen=True)
class Lane:
    """Where cells run one after the other. overrides: the settings that put a launch onto the lane's nodes."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepManner:
    """How cells are launched. arguments: options of every `burst launch`. retry: results that are run once more."""

    runs_dir: Path
    lanes: tuple[Lane, ...] = (Lane("this machine"),)
    arguments: tuple[str, ...] = ()
    max_failures: int | None = None
    retry: frozenset[str] = frozenset()
    command: tuple[str, ...] = (sys.executable, "-m", "burst_cli")


class SweepObserver(Protocol):
    """Whoever shows a sweep to a person."""

    def tick(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Called several times a second with the cells as they are recorded."""

    def note(self, text: str) -> None:
        """Something that a person should know."""


class Stops(Protocol):
    """Counts requests to stop; see `StopRequests`."""

    count: int
    cause: str


@dataclass
class _Job:
    """A cell at work. process: None: its run belongs to a launcher that this sweep did not start, and is watched."""

    cell_id: str
    lane: Lane
    run: RunFolder
    process: subprocess.Popen[bytes] | None = None
    signals: int = 0


@dataclass
class SweepRunner:
    """Runs the cells of `folder` that have no result yet; `run` returns when all have one, or when it was stopped."""

    folder: SweepFolder
    manner: SweepManner
    observer: SweepObserver
    stop: Stops
    _jobs: list[_Job] = field(default_factory=list)
    _cells: list[dict[str, Any]] = field(default_factory=list)
    _launched: Counter[str] = field(default_factory=Counter)  # by this process: those of a killed sweep do not count

    def run(self) -> list[dict[str, Any]]:
        """The cells at the end. Raises SweepError while another process runs this sweep."""
        with self.folder.locked():
            self._cells = self.folder.read()["cells"]
            self._reopen()
            try:
                self._loop()
            finally:
                self._end_children()
            return self._cells

    def _loop(self) -> None:
        while True:
            for job in [job for job in self._jobs if self._is_over(job)]:
                self._jobs.remove(job)
                self._conclude(job)
            self._pass_on_stop()
            if self.stop.count == 0 and not self._has_failed_enough():
                self._fill_lanes()
            self.observer.tick(self._cells)
            if not self._jobs:
                return
            time.sleep(POLL_S)

    # --- which cells ------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Cells whose result is to be tried once more, and those that were cancelled, wait again."""
        for cell in self._cells:
            predicted = (cell.get("result") or {}).get("predicted")
            again = "--force" in self.manner.arguments if predicted else cell["state"] in self.manner.retry
            if again or cell["state"] == "cancelled":
                self._update(cell["id"], state="pending", launches=0, result=None, exit_code=None)

    def _has_failed_enough(self) -> bool:
        failures = sum(cell["state"] == "failed" for cell in self._cells)
        return self.manner.max_failures is not None and failures >= self.manner.max_failures

    def _fill_lanes(self) -> None:
        """Start the next cell of every lane that is free: first those that an earlier sweep had begun."""
        busy = {job.cell_id for job in self._jobs}
        waiting = [cell for cell in self._cells if cell["state"] in ("running", "pending") and cell["id"] not in busy]
        waiting.sort(key=lambda cell: cell["state"] != "running")
        taken = {job.lane for job in self._jobs}
        for lane in (lane for lane in self.manner.lanes if lane not in taken):
            while cell := next((cell for cell in waiting if self._suits(cell, lane)), None):
                waiting.remove(cell)
                if self._begin(cell, lane):
                    break

    def _suits(self, cell: Mapping[str, Any], lane: Lane) -> bool:
        """A run that was begun stays on its nodes, which are those of its lane."""
        names = {lane.name for lane in self.manner.lanes}
        return cell["run_path"] is None or cell["lane"] not in names or cell["lane"] == lane.name

    # --- one cell ---------------------------------------------------------------------------------------------------

    def _begin(self, cell: Mapping[str, Any], lane: Lane) -> bool:
        """Whether the lane is now taken; not by a cell whose result was there already, or that is given up."""
        stays = cell["run_path"] and cell["lane"] == lane.name
        run = RunFolder(Path(cell["run_path"]) if stays else new_run_path(self.manner.runs_dir, cell["exp"]))
        if self._launched[cell["id"]] >= MOST_LAUNCHES:
            message = f"its launcher was lost {MOST_LAUNCHES} times; see {self.folder.output_path(cell['id'])}"
            self._update(cell["id"], state="failed", ended_at=utc_now(), result={"message": message})
            return False
        state = _state(run)
        job = _Job(cell["id"], lane, run)
        if state in FINAL_STATES and state != "cancelled" and cell["state"] == "running":
            self._conclude(job)
            return False
        if state in ("starting", "running") and run.is_alive() is not False:
            self.observer.note(f"{cell['id']} still runs under another launcher; waiting for it")
            self._jobs.append(job)
            return True
        facts = {"run_path": str(run.path), "lane": lane.name, "started_at": utc_now()}
        self._update(cell["id"], state="running", launches=cell["launches"] + 1, **facts)
        self._launched[cell["id"]] += 1
        job.process = self._spawn(self._command(cell, lane, run, taken_up=state is not None), cell["id"])
        self._jobs.append(job)
        return True

    def _command(self, cell: Mapping[str, Any], lane: Lane, run: RunFolder, *, taken_up: bool) -> list[str]:
        """A launch into the recorded folder; of a run that is there already, its next attempt."""
        if taken_up:
            return [*self.manner.command, "resume", str(run.path), "--plain"]
        words = [*cell["overrides"], *lane.overrides]
        return [*self.manner.command, "launch", *words, "--run-path", str(run.path), *self.manner.arguments, "--plain"]

    def _spawn(self, command: Sequence[str], cell_id: str) -> subprocess.Popen[bytes]:
        me = os.getpid()

        def prepare() -> None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != me:
                os._exit(1)  # killed before the kernel was asked: nobody would tell

        with self.folder.output_path(cell_id).open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C of the terminal comes to the sweep alone, which passes it on
                preexec_fn=prepare,
            )

    def _is_over(self, job: _Job) -> bool:
        if job.process is not None:
            return job.process.poll() is not None
        return _state(job.run) in FINAL_STATES or job.run.is_alive() is False

    def _conclude(self, job: _Job) -> None:
        """Record what came of a cell: what run.json says, or, where no run was created, what the launch said."""
        code = None if job.process is None else job.process.returncode
        state = _state(job.run)
        if state is None:
            if code is not None and code < 0:
                return  # killed before it had a run; the cell stays as it is recorded, and is begun again
            cancelled = code == 130 or self.stop.count > 0
            said = None if cancelled else {"message": last_words(self.folder.output_path(job.cell_id))}
            state = "pending" if cancelled else "failed"
            self._update(job.cell_id, state=state, ended_at=utc_now(), exit_code=code, result=said)
            return
        if state not in FINAL_STATES:
            return  # its launcher was lost; the cell is still recorded as running, and is begun again
        if state == "cancelled" and job.process is None and self.stop.count == 0:
            return  # likewise: the launch of a killed sweep, which was still on its way out
        record = run_record(job.run)
        result = {
            "message": (record.get("failure") or {}).get("message"),
            **{name: record.get(name) for name in _FIGURES},
        }
        facts = {"exit_code": record.get("exit_code"), "ended_at": utc_now(), "result": result}
        self._update(job.cell_id, state=state, run_path=str(job.run.path), **facts)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _pass_on_stop(self) -> None:
        """Every Ctrl-C of the sweep is one of each launch: the first stops it, the second kills it."""
        for job in self._jobs:
            while job.process is not None and job.signals < self.stop.count:
                job.signals += 1
                job.process.send_signal(signal.SIGINT)

    def _end_children(self) -> None:
        """Whatever ends this sweep ends its launches."""
        for job in self._jobs:
            if job.process is not None and job.process.poll() is None:
                job.process.terminate()

    def _update(self, cell_id: str, **facts: Any) -> None:
        self.folder.update_cell(cell_id, **facts)
        for cell in self._cells:
            if cell["id"] == cell_id:
                cell.update(facts)


def last_words(log: Path) -> str:
    """The last line of a launch that says what is wrong; else its last line."""
    lines = [line.strip() for line in tail_text(log, _MESSAGE_BYTES).splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]


def _state(run: RunFolder) -> str | None:
    """The state of a run; None as long as there is none, or its record cannot be read."""
    if not (run.path / "run.json").exists():
        return None
    try:
        return str(run.read_state()["state"])
    except BurstError:
        return None
