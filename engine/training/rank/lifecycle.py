"""How a run begins and ends on a rank: the moves of run.json.

Rank 0 says running and completed; without a launcher ranks say the rest.

burst launch:   planned -> starting (launcher) -> running, completed (rank 0);   failed, cancelled, oom (launcher)
torchrun alone: planned -> starting, running, completed (rank 0);   failed, cancelled, oom (the rank that met it)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.errors import BurstError
from engine.config.settings import load_config
from engine.runs.folder import FINAL_STATES, RUN_ID_VARIABLE, RunFolder, RunFolderError, describe_error
from engine.runs.oom import less_memory_text
from engine.training.rank.process import RankStatus


@contextlib.contextmanager
def run_states(
    run: RunFolder, status: RankStatus, *, rank: int, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Around all that a rank does: moves run.json to running at the start and to its final state at the end."""
    # Rank 0 looks at the run itself, because plan.sh sets the variable of a launcher that is not there.
    launched = _is_starting(run) if rank == 0 else RUN_ID_VARIABLE in environment
    try:
        if rank == 0:
            if not launched:
                run.transition("starting")
            _move_to_running(run)
        yield
    except BaseException as error:
        if not launched:
            _record_end(run, status, rank, error)
        raise
    if rank == 0:
        run.transition("completed", exit_code=0)


def _move_to_running(run: RunFolder) -> None:
    """Rank 0's move; a run that another rank has already ended stays so, and this rank meets the same end soon."""
    try:
        run.transition("running")
    except RunFolderError:
        if run.read_state()["state"] not in FINAL_STATES:
            raise


def _is_starting(run: RunFolder) -> bool:
    """Whether a living launcher has begun this attempt and waits for its ranks."""
    return run.read_state()["state"] == "starting" and run.is_alive() is not False


def _record_end(run: RunFolder, status: RankStatus, rank: int, error: BaseException) -> None:
    """Moves the run to failed, oom or cancelled; a final state that another rank wrote first stays."""
    if isinstance(error, KeyboardInterrupt):
        state, exit_code, failure = "cancelled", 130, None
    else:
        status.reserve = None  # given back, to say what went wrong
        facts = describe_error(error)
        state, exit_code = ("oom" if facts["kind"] == "oom" else "failed"), facts["exit_code"]
        kept = {key: facts[key] for key in ("kind", "type", "message", "exit_code", "memory")}
        place = {"rank": rank, "step": status.step, "phase": status.phase}
        failure = {**kept, **place, "advice": _advice(run, facts["memory"])}
    with contextlib.suppress(RunFolderError):
        run.transition(state, exit_code=exit_code, failure=failure)


def _advice(run: RunFolder, memory: Mapping[str, Any] | None) -> str | None:
    """What makes the run need less memory, for a run that ran out of it."""
    if memory is None:
        return None
    try:
        return less_memory_text(load_config(run.path / "config.yaml"), memory["where"])
    except BurstError:
        return None
