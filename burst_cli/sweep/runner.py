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
from typing import Any

from burst_cli.app import EXIT_INTERRUPTED
from burst_cli.runs.choose import state_of
from burst_cli.runs.sweeps import SweepFolder
from burst_cli.sweep.request import SweepRequest
from burst_cli.sweep.view import SweepView
from cluster.control.attempt import StopRequests, tail_text
from engine.runs.folder import FINAL_STATES, RunFolder, new_run_path
from engine.runs.process import die_with_parent
from engine.runs.record import python_path

POLL_S = 0.2
# A launch that is killed again and again without leaving a result is not tried for ever.
MOST_LAUNCHES = 3
_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Lane:
    """Where cells run one after the other. overrides: the settings that put a launch onto the lane's nodes."""

    name: str
    overrides: tuple[str, ...] = ()


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
    request: SweepRequest
    lanes: tuple[Lane, ...]
    view: SweepView
    stop: StopRequests
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "burst_cli")
    _jobs: list[_Job] = field(default_factory=list)
    _cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    _launched: Counter[str] = field(default_factory=Counter)  # by this process: those of a killed sweep do not count

    def run(self) -> list[dict[str, Any]]:
        """The cells at the end. Raises SweepError while another process runs this sweep."""
        with self.folder.locked():
            self._cells = {cell["id"]: cell for cell in self.folder.cells()}
            self._waiting = [cell["id"] for cell in self._cells.values() if self._is_to_run(cell)]
            self._waiting.sort(key=lambda name: self._cells[name]["run_path"] is None)  # what was begun goes on first
            try:
                self._loop()
            finally:
                self._end_children()
            return list(self._cells.values())

    def _loop(self) -> None:
        while True:
            for job in [job for job in self._jobs if self._is_over(job)]:
                self._jobs.remove(job)
                self._conclude(job)
            self._pass_on_stop()
            if self.stop.count == 0 and not self._has_failed_enough():
                self._fill_lanes()
            self.view.tick(list(self._cells.values()))
            if not self._jobs:
                return
            time.sleep(POLL_S)

    # --- which cells ------------------------------------------------------------------------------------------------

    def _is_to_run(self, cell: Mapping[str, Any]) -> bool:
        """Whether it has no result yet, or one that is to be tried once more."""
        if (cell["result"] or {}).get("predicted"):
            return self.request.force
        return cell["state"] in {"pending", "running", "cancelled", *(self.request.retry or ())}

    def _has_failed_enough(self) -> bool:
        failures = sum(cell["state"] == "failed" for cell in self._cells.values())
        return self.request.max_failures is not None and failures >= self.request.max_failures

    def _fill_lanes(self) -> None:
        """Start the next cell of every lane that is free."""
        taken = {job.lane for job in self._jobs}
        for lane in (lane for lane in self.lanes if lane not in taken):
            cells = (self._cells[name] for name in self._waiting)
            if (cell := next((cell for cell in cells if self._suits(cell, lane)), None)) is not None:
                self._waiting.remove(cell["id"])
                self._begin(cell, lane)

    def _suits(self, cell: Mapping[str, Any], lane: Lane) -> bool:
        """A run that was begun stays on its nodes, which are those of its lane."""
        is_free = cell["run_path"] is None or cell["lane"] not in {one.name for one in self.lanes}
        return is_free or cell["lane"] == lane.name

    # --- one cell ---------------------------------------------------------------------------------------------------

    def _begin(self, cell: dict[str, Any], lane: Lane) -> None:
        """Launch a cell, or its next attempt where its run is there; wait for a run that another launcher leads."""
        stays = cell["run_path"] and cell["lane"] == lane.name
        runs_dir = self.request.runs_dir.absolute()
        run = RunFolder(Path(cell["run_path"]) if stays else new_run_path(runs_dir, cell["exp"]))
        state = state_of(run)
        job = _Job(cell["id"], lane, run)
        self._jobs.append(job)
        if state in ("starting", "running") and run.is_alive() is not False:
            self.view.note(f"{cell['id']} still runs under another launcher; waiting for it")
            return
        self._update(cell, run_path=str(run.path), lane=lane.name, launches=cell["launches"] + 1, refused=None)
        cell.update(state="running", result=None)
        self._launched[cell["id"]] += 1
        job.process = self._spawn(self._command(cell, lane, run, taken_up=state is not None), cell["id"])

    def _command(self, cell: Mapping[str, Any], lane: Lane, run: RunFolder, *, taken_up: bool) -> list[str]:
        """A launch into the recorded folder; of a run that is there already, its next attempt."""
        if taken_up:
            return [*self.command, "resume", str(run.path), "--plain"]
        words = [*cell["overrides"], *lane.overrides, "--run-path", str(run.path), "--plain"]
        folders = [word for one in self.request.config_dir or () for word in ("--config-dir", str(one.absolute()))]
        return [*self.command, "launch", *words, *folders, *(["--force"] if self.request.force else [])]

    def _spawn(self, command: Sequence[str], cell_id: str) -> subprocess.Popen[bytes]:
        me = os.getpid()

        def prepare() -> None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != me:
                os._exit(1)  # killed before the kernel was asked: nobody would tell

        with self.folder.output_path(cell_id).open("ab") as output:
            return subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C of the terminal comes to the sweep alone, which passes it on
                preexec_fn=prepare,
            )

    def _is_over(self, job: _Job) -> bool:
        if job.process is not None:
            return job.process.poll() is not None
        return state_of(job.run) in FINAL_STATES or job.run.is_alive() is False

    def _conclude(self, job: _Job) -> None:
        """See what came of a cell: what run.json says, or, where no run was created, what the launch said."""
        cell, log, state = self._cells[job.cell_id], self.folder.output_path(job.cell_id), state_of(job.run)
        code = None if job.process is None else job.process.returncode
        # The launch of a killed sweep may have cancelled its run on its way out.
        is_left = state == "cancelled" and job.process is None and self.stop.count == 0
        if state not in FINAL_STATES or is_left:
            was_refused = state is None and code is not None and code >= 0 and code != EXIT_INTERRUPTED
            if was_refused and self.stop.count == 0:
                self._update(cell, refused=last_words(log))
            elif self._launched[job.cell_id] < MOST_LAUNCHES:
                self._waiting.insert(0, job.cell_id)
            else:
                self._update(cell, refused=f"its launcher was lost {MOST_LAUNCHES} times; see {log}")
        cell.update(self.folder.now(cell))

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

    def _update(self, cell: dict[str, Any], **facts: Any) -> None:
        self.folder.update_cell(cell["id"], **facts)
        cell.update(facts)


def last_words(log: Path) -> str:
    """The last line of a launch that says what is wrong; else its last line."""
    lines = [line.strip() for line in tail_text(log, _MESSAGE_BYTES).splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
