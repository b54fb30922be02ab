"""The frame around a rank: its log file, its death with torchrun, and the error it leaves behind.

`engine/train.py` calls `run_rank` before it imports torch, so that even a failing import is in the rank's log.
Standard library only.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from engine.errors import BurstError
from engine.memory.oom import RESERVE_BYTES
from engine.run.flight import BUFFER_ENTRIES, BUFFER_VARIABLE
from engine.run.process import die_with_parent, redirect_output
from engine.run.rank_report import Progress, RankPlace, RankReport
from engine.runs import RANK_LOGS_VARIABLE, RUN_ID_VARIABLE, RunFolder, node_name
from engine.waits import WaitClock

__all__ = ["RANK_LOGS_VARIABLE", "RUN_ID_VARIABLE", "RankStatus", "leave", "run_rank"]


class RankStatus:
    """Where a rank is; the trainer keeps it current so that an error, or somebody outside, can say where it was.

    phase: import torch, start, prepare data, build model, measure peak, restore, first weights; in a step load batch,
    count labels, forward, loss, backward, optimizer; evaluate; train when it is none of these.
    `waits` knows for whom the rank waits.
    `reserve` is address space (untouched, so no memory) for saying what went wrong after memory ran out.
    """

    def __init__(self, step: int | None = None, phase: str | None = None) -> None:
        self.waits = WaitClock()
        self.reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self._progress = Progress(step, phase)
        self._report: RankReport | None = None

    @property
    def step(self) -> int | None:
        """The optimizer step that runs, from 1."""
        return self._progress.step

    @step.setter
    def step(self, value: int | None) -> None:
        self._progress.step, self._progress.micro_step = value, 0
        self._changed()

    @property
    def micro_step(self) -> int:
        """The micro-step of it that runs, from 0."""
        return self._progress.micro_step

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self._progress.micro_step = value

    @property
    def phase(self) -> str | None:
        """What the rank does."""
        return self._progress.phase

    @phase.setter
    def phase(self, value: str | None) -> None:
        self._progress.phase = value
        self._progress.phase_since_ns = time.time_ns()
        self._changed()

    @property
    def advances(self) -> int:
        """How often a phase said that it goes on."""
        return self._progress.advances

    def advance(self) -> None:
        """The phase goes on: whoever watches shall not take a long one for a hang."""
        self._progress.advances += 1
        self._changed()

    def step_done(self, step_time_s: float) -> None:
        """A step has ended, after so long on the slowest rank."""
        self._progress.steps_done += 1
        self._progress.step_time_s = step_time_s
        self._changed()

    def report_to(self, place: RankPlace) -> None:
        """From now on the files of `place` say where the rank is."""
        self._report = RankReport(place, self._progress, self.waits)
        self._report.start()

    def end_report(self, ended: str) -> None:
        """The rank is about to leave; `ended` is ok or the type of its error."""
        self._progress.ended = ended
        if self._report is not None:
            self._report.close()
            self._report = None

    def release_reserve(self) -> None:
        """Gives the reserve back; called before an error is described."""
        self.reserve = None

    def _changed(self) -> None:
        if self._report is not None:
            self._report.changed()


def run_rank(run: RunFolder, body: Callable[[RankStatus], None]) -> int:
    """The exit code of this rank after `body(status)`: 0, or that of the error, which is left in the run folder.

    With BURST_RANK_LOGS set (the launcher sets it) output goes to logs/<node>/rank<NNNN>.log; without it, to the
    terminal. Under torchrun the process dies when torchrun dies. KeyboardInterrupt gives 130.
    """
    rank = int(os.environ.get("RANK", "0"))
    log = run.log_path(node_name(), rank)
    if os.environ.get(RANK_LOGS_VARIABLE):
        redirect_output(log)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    os.environ.setdefault(BUFFER_VARIABLE, str(BUFFER_ENTRIES))
    faulthandler.enable(2)  # a crash in native code leaves its stacks in the log
    status = RankStatus()
    status.report_to(RankPlace(rank, node_name(), log))
    try:
        body(status)
    except KeyboardInterrupt:
        status.end_report("KeyboardInterrupt")
        return 130
    except Exception as error:
        status.release_reserve()
        run.write_rank_error(rank, error, step=status.step, phase=status.phase)
        status.end_report(type(error).__name__)
        return _say(error)
    status.end_report("ok")
    return 0


def leave(exit_code: int) -> None:
    """End this process now with `exit_code`; a failed rank must not wait for peers in destructors of process groups.

    A rank that did well returns, to run what is registered for the exit; but what torch has made by then is not looked
    through once more for cycles, which took 0.8 of a second.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)
    gc.disable()
    gc.freeze()


def _say(error: Exception) -> int:
    if isinstance(error, BurstError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1
