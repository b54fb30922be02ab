"""The frame around a rank: its log file, its death with torchrun, and the error it leaves behind.

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
    faulthandler.enable(2)  # a crash in native code leaves its stacks in the log
    status = RankStatus()
    status.report_to(rank, node_name(), log)
    try:
        body(status)
    except KeyboardInterrupt:
        status.end_report("KeyboardInterrupt")
        return 130
    except Exception as error:
        status.reserve = None  # given back, to say what went wrong
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
    """End this process now with `exit_code`; a failed rank must not wait for peers in destructors of process groups.

    A rank that did well returns, to run what is registered for the exit; but what torch has made by then is not looked
    through once more for cycles, which took 0.8 of a second.
    """
    with contextlib.suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)
    gc.disable()
    gc.freeze()
