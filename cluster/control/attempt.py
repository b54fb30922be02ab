"""What run.json and the run folder go through: a new attempt, news from a node far away, and the end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from cluster.control.evidence import log_starts
from cluster.control.outcome import LaunchOutcome
from cluster.control.stopping import clear_cancel
from cluster.plan import LaunchPlan
from engine.runs.folder import FINAL_STATES, RunFolder, RunFolderError
from engine.runs.records import read_json_object

_LOG_STARTS = "log_starts"


@dataclass(frozen=True)
class Restarts:
    """How often in a row a run has begun again without a further checkpoint, and the step of the newest one."""

    in_a_row: int = 0
    saved: int = 0

    def after(self, run: RunFolder) -> Restarts:
        """With one more, after the attempt that lies in the folder of `run`."""
        step = max(run.saved_steps(), default=0)
        return Restarts(1, step) if step > self.saved else Restarts(self.in_a_row + 1, self.saved)


def begin_attempt(plan: LaunchPlan, run: RunFolder, lease_s: float | None) -> None:
    """Move the run to starting; what an earlier attempt left under nodes/ goes to attempts/<N>/nodes/.

    Raises RunFolderError when the run is under way, or its folder cannot be written.
    """
    document = run.transition(
        "starting",
        world_size=plan.world_size,
        backend=plan.backend.name,
        launcher=plan.launcher,
        nodes=[node.name for node in plan.nodes],
        nodes_started_at=None,
        job=None,
        lease_s=lease_s,
        leftover=[],
        **{_LOG_STARTS: log_starts(plan, run)},
    )
    try:
        clear_cancel(run)
        if document["attempt"] > 1:
            _put_nodes_aside(plan, run, document["attempt"] - 1)
    except OSError as error:
        raise RunFolderError(f"Run {run.run_id} cannot begin another attempt: {error}.") from error


def read_log_starts(run: RunFolder) -> dict[str, int]:
    """How long every torchrun.log was when the attempt began, as `begin_attempt` recorded it."""
    starts = run.read_state().get(_LOG_STARTS)
    if not isinstance(starts, dict):
        return {}
    return {name: start for name, start in starts.items() if isinstance(start, int)}


def lease_of(run: RunFolder) -> float | None:
    """How long the nodes of this attempt go on without a launcher; None: for ever."""
    lease_s = run.read_state().get("lease_s")
    return float(lease_s) if isinstance(lease_s, int | float) and not isinstance(lease_s, bool) else None


def follow_first_node(plan: LaunchPlan, run: RunFolder) -> str:
    """The state of the run, after taking over what rank 0 wrote in its own run.json, if that is another file."""
    state = str(run.read_state()["state"])
    path = run.path / "nodes" / run.log_dir(plan.nodes[0].name).name / "run.json"
    if state not in ("starting", "running"):
        return state
    with contextlib.suppress(OSError, ValueError, RunFolderError):  # a full disk: the ranks go on, we try again
        told = (read_json_object(path) or {}).get("state")
        steps = {"running": ("running",), "completed": ("running", "completed")}.get(str(told), ())
        for step in steps[steps.index(state) + 1 :] if state in steps else steps:
            run.transition(step)
            state = step
    return state


def finish(run: RunFolder, outcome: LaunchOutcome) -> LaunchOutcome:
    """Write the outcome to run.json; a final state that rank 0 already wrote stays."""
    facts: dict[str, Any] = {
        "exit_code": outcome.exit_code,
        "failure": outcome.failure.to_dict() if outcome.failure else None,
        "leftover": [str(leftover) for leftover in outcome.leftover],
    }
    if run.read_state()["state"] in FINAL_STATES:
        run.record(**facts)
    else:
        run.transition(outcome.status, **facts)
    with contextlib.suppress(OSError):
        clear_cancel(run)
    return outcome


def _put_nodes_aside(plan: LaunchPlan, run: RunFolder, attempt: int) -> None:
    for node in plan.nodes:
        name = run.log_dir(node.name).name
        source = run.path / "nodes" / name
        if not (source / "outcome.json").exists():
            continue  # its supervisor may live: it says so itself when it is asked to start
        target = run.path / "attempts" / str(attempt) / "nodes" / name
        target.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.is_file():
                path.rename(target / path.name)
