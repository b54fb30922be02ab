"""The frame around a rank: its log file, its death with torchrun, and the error it leaves behind.

`engine/train.py` calls `run_rank` before it imports torch, so that even a failing import is in the rank's log.
Standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import BurstError
from engine.memory.oom import RESERVE_BYTES
from engine.run.process import die_with_parent, redirect_output
from engine.runs import RANK_LOGS_VARIABLE, RUN_ID_VARIABLE, RunFolder

__all__ = ["RANK_LOGS_VARIABLE", "RUN_ID_VARIABLE", "RankStatus", "leave", "run_rank"]


@dataclass
class RankStatus:
    """Where a rank is; the trainer keeps it current so that an error can say when it happened.

    phase: start, prepare data, build model, measure peak; in a step forward, loss, backward, optimizer; evaluate; train
    when it is none of these. `reserve` is address space (untouched, so no memory) for saying what went wrong after
    memory ran out.
    """

    step: int | None = None
    phase: str | None = None
    reserve: bytearray | None = field(default_factory=lambda: bytearray(RESERVE_BYTES), repr=False)

    def release_reserve(self) -> None:
        """Gives the reserve back; called before an error is described."""
        self.reserve = None


def run_rank(run: RunFolder, body: Callable[[RankStatus], None]) -> int:
    """The exit code of this rank after `body(status)`: 0, or that of the error, which is left in the run folder.

    With BURST_RANK_LOGS set (the launcher sets it) output goes to logs/<host>/rank<NNNN>.log; without it, to the
    terminal. Under torchrun the process dies when torchrun dies. KeyboardInterrupt gives 130.
    """
    rank = int(os.environ.get("RANK", "0"))
    if os.environ.get(RANK_LOGS_VARIABLE):
        redirect_output(run.log_path(socket.gethostname(), rank))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    faulthandler.enable(2)  # a crash in native code leaves its stacks in the log
    status = RankStatus()
    try:
        body(status)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        status.release_reserve()
        run.write_rank_error(rank, error, step=status.step, phase=status.phase)
        return _say(error)
    return 0


def leave(exit_code: int) -> None:
    """End this process now with `exit_code`; a failed rank must not wait for peers in destructors of process groups."""
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)


def _say(error: Exception) -> int:
    if isinstance(error, BurstError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1
