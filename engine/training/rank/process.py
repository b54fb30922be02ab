"""Runs a rank's work in its process: log file, death with torchrun, error record, exit code.

`engine/train.py` calls `run_rank` before it imports torch, so that even a failing import is in the rank's log.
Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable

from engine.config.errors import BurstError
from engine.runs.folder import RANK_LOGS_VARIABLE, RunFolder, node_name
from engine.runs.process import die_with_parent, redirect_output
from engine.training.rank.report import RankStatus

__all__ = ["RankStatus", "leave", "run_rank"]


def run_rank(run: RunFolder, body: Callable[[RankStatus], None]) -> int:
    """Run `body(status)`; return the exit code: 0, that of the error, or 130 for KeyboardInterrupt.

    An error is written to the run folder. With BURST_RANK_LOGS set (by the launcher) output goes to
    logs/<node>/rank<NNNN>.log, else to the terminal. Under torchrun the process is killed when torchrun dies.
    """
    rank = int(os.environ.get("RANK", "0"))
    log = run.log_path(node_name(), rank)
    if os.environ.get(RANK_LOGS_VARIABLE):
        redirect_output(log)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    faulthandler.enable(2)  # a crash in native code writes its stacks to the log
    status = RankStatus()
    status.report_to(rank, node_name(), log)
    try:
        body(status)
    except KeyboardInterrupt:
        status.end_report("KeyboardInterrupt")
        return 130
    except Exception as error:
        status.reserve = None  # frees address space for reporting after memory ran out
        run.write_rank_error(rank, error, step=status.step, phase=status.phase)
        status.end_report(type(error).__name__)
        with contextlib.suppress(OSError):  # even the log may be on a full disk
            if isinstance(error, BurstError):
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exception(error)
        return error.exit_code if isinstance(error, BurstError) else 1
    status.end_report("ok")
    return 0


def leave(exit_code: int) -> None:
    """End this process if `exit_code` is not 0; a failed rank must not wait for peers in destructors of process groups.

    With 0 it returns, so that exit handlers run, and disables the garbage collector: its last pass over torch's objects
    took 0.8 s.
    """
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)
    gc.disable()
    gc.freeze()
