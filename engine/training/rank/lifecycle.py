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
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError, describe_error
from engine.runs.oom import less_memory_text
from engine.runs.process import RUN_ID_VARIABLE
from engine.runs.record import resolved_config
from engine.training.rank.process import RankStatus


@contextlib.contextmanager
def run_states(
    run: RunFolder, status: RankStatus, *, rank: int, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Around all that a rank does: moves run.json to running at the start and to its final state at the end."""
    launched = RUN_ID_VARIABLE in environment
    if rank == 0:  # looks at the run itself, because plan.sh sets the variable of a launcher that is not there
        launched = run.read_state()["state"] == "starting" and run.is_alive() is not False
    try:
        if rank == 0:
            if not launched:
                run.transition("starting")
            try:
                run.transition("running")
            except (
                RunFolderError
            ):  # a run that another rank has already ended stays so: this one meets the same end soon
                if run.read_state()["state"] not in FINAL_STATES:
                    raise
        yield
    except BaseException as error:
        if not launched:
            with contextlib.suppress(RunFolderError):  # a final state that another rank wrote first stays
                state, facts = _end(run, status, rank, error)
                run.transition(state, **facts)
        raise
    if rank == 0:
        run.transition("completed", exit_code=0)


def _end(run: RunFolder, status: RankStatus, rank: int, error: BaseException) -> tuple[str, dict[str, Any]]:
    """(failed, oom or cancelled, facts of it)."""
    if isinstance(error, KeyboardInterrupt):
        return "cancelled", {"exit_code": 130, "failure": None}
    status.reserve = None  # given back, to say what went wrong
    facts, advice = describe_error(error), None
    if facts["memory"] is not None:  # what makes the run need less of it
        with contextlib.suppress(BurstError):
            advice = less_memory_text(resolved_config(run.path), facts["memory"]["where"])
    kept = {key: facts[key] for key in ("kind", "type", "message", "exit_code", "memory")}
    failure = {**kept, "rank": rank, "step": status.step, "phase": status.phase, "advice": advice}
    return "oom" if facts["kind"] == "oom" else "failed", {"exit_code": facts["exit_code"], "failure": failure}
