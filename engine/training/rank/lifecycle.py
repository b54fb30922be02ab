"""State transitions of run.json that ranks make.

Rank 0 sets running and completed; without a launcher ranks set the others, too.

burst launch:   planned -> starting (launcher) -> running, completed (rank 0);   failed, cancelled, oom (launcher)
torchrun alone: planned -> starting, running, completed (rank 0);   failed, cancelled, oom (the first rank to fail)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.errors import BurstError
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError, describe_error
from engine.runs.oom import less_memory_text
from engine.runs.process import RUN_ID_VARIABLE
from engine.runs.record import resolved_config
from engine.training.rank.process import RankStatus


@contextlib.contextmanager
def run_states(
    run: RunFolder, status: RankStatus, *, rank: int, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Set run.json to running before the body and to its final state after it; the body is all that a rank does."""
    launched = RUN_ID_VARIABLE in environment
    if rank == 0:  # plan.sh sets the variable without a launcher, so rank 0 looks at the run's state itself
        launched = run.read_state()["state"] == "starting" and run.is_alive() is not False
    try:
        if rank == 0:
            if not launched:
                run.transition("starting")
            try:
                run.transition("running")
            except RunFolderError:
                # Another rank may have set a final state already; this rank fails soon as well, so leave it.
                if run.read_state()["state"] not in FINAL_STATES:
                    raise
        yield
    except BaseException as error:
        if not launched:
            with contextlib.suppress(RunFolderError):  # another rank may have set a final state first
                state, facts = _end(run, status, rank, error)
                run.transition(state, **facts)
        raise
    if rank == 0:
        run.transition("completed", exit_code=0)


def _end(run: RunFolder, status: RankStatus, rank: int, error: BaseException) -> tuple[str, dict[str, Any]]:
    """Return the final state (failed, oom or cancelled) and its facts."""
    if isinstance(error, KeyboardInterrupt):
        return "cancelled", {"exit_code": 130, "failure": None}
    status.reserve = None  # frees address space for reporting after memory ran out
    facts, advice = describe_error(error), None
    if facts["memory"] is not None:
        with contextlib.suppress(BurstError):
            advice = less_memory_text(resolved_config(run.path), facts["memory"]["where"])
    failure = {key: facts[key] for key in ("kind", "type", "message", "exit_code", "memory")}
    failure |= {"rank": rank, "step": status.step, "phase": status.phase, "advice": advice}
    return "oom" if facts["kind"] == "oom" else "failed", {"exit_code": facts["exit_code"], "failure": failure}
