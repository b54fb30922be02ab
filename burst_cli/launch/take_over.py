"""Going on with a run: whether it is taken over, started again, or left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from burst_cli import render
from burst_cli.launch.detach import launch_detached
from burst_cli.launch.launching import lead_run, renewed_plan
from burst_cli.options import LaunchRequest, OutputOptions
from burst_cli.runs.failure import failure_line
from burst_cli.runs.read import run_record
from cluster.control.attempt import ControllerBusyError, RunState, StopRequests, find_controller
from cluster.control.controller import settle
from cluster.control.runner import read_run_plan
from cluster.errors import ClusterError
from cluster.plan import launch_folder
from engine.config.errors import ConfigError
from engine.runs.folder import FINAL_STATES, RunFolder

ResumeAction = Literal["done", "take over", "start"]


class UnknownRunError(ClusterError):
    """Nobody can say whether the run lives."""

    exit_code = 3


def resume_run(run: RunFolder, request: LaunchRequest, options: OutputOptions) -> int:
    """The exit code of the run, after it was led to its end or left to the background.

    request: other nodes for the next attempt, and whether they are checked. Raises ControllerBusyError when a process
    controls it, UnknownRunError when its nodes cannot be asked, PlanFileError when `burst launch` did not start it.
    """
    plan = read_run_plan(run.path)
    _check_folder(run, launch_folder(run.path))
    console = options.console()
    way = resume_action(run, console)
    if way == "done":
        text = f"{run.exp}/{run.run_id} is completed, there is nothing to resume; more: burst report {run.run_id}"
        render.show({**run_record(run), "exit_code": 0}, text, as_json=options.as_json)
        return 0
    if way == "start":
        plan = renewed_plan(plan, run, request)
    elif request.names_nodes:
        raise ConfigError(f"run {run.run_id} still runs on its nodes; burst cancel it before it gets others")
    stop = StopRequests()
    with stop.listening():
        if options.detach:
            return launch_detached(run, stop, console, as_json=options.as_json, start=way == "start")
        return lead_run(plan, run, stop, options, start=way == "start")


def _check_folder(run: RunFolder, launched: Path) -> None:
    """Raise ConfigError where the folder was copied or moved: its commands would run in the folder of the launch."""
    if run.path.resolve() != launched.resolve():
        raise ConfigError(
            f"run {run.run_id} was launched in {launched}, but this folder is {run.path}: a copy, or moved. Resume it "
            "where it was launched (move it back), or continue from it as a new run: "
            f"burst launch ... train.checkpoint.resume_from={run.path}"
        )


def resume_action(run: RunFolder, console: Console, ask: Callable[[RunFolder], RunState] = settle) -> ResumeAction:
    """What to do with the run, said on `console`; `ask` has the nodes of a run that nobody controls asked."""
    controller = find_controller(run)
    if controller is not None:
        raise ControllerBusyError(run, controller)
    state = str(run.read_state()["state"])
    if state in ("starting", "running"):
        render.say(console, Text(f"asking the nodes of {run.exp}/{run.run_id}", style="dim"))
        resolved = ask(run)
        if resolved.controller is not None:
            raise ControllerBusyError(run, resolved.controller)
        if resolved.problem is not None and not resolved.is_final:
            raise UnknownRunError(
                f"Run {run.run_id} may live or not: {resolved.problem}. Try again when its nodes can be "
                f"reached, or stop what can be reached with `burst cancel {run.run_id}`."
            )
        state = resolved.state
    document = run.read_state()
    if state == "completed":
        return "done"
    if state not in FINAL_STATES and state != "planned":
        render.say(console, f"it runs on without a controller: taking it over, attempt {document['attempt']}")
        return "take over"
    if state in FINAL_STATES:
        why = ": ".join(filter(None, [state, failure_line(document.get("failure"))]))
        render.say(console, f"it had ended ({why}); starting attempt {document['attempt'] + 1}")
    return "start"
