"""Leaving a run to a process in the background: it starts the nodes, and this one returns once they run.

That process is `python -m burst_cli.launch.launching RUN start|take-over`; what it says goes to RUN/controller.log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from rich.console import Console
from rich.text import Text

from burst_cli import render
from burst_cli.runs.failure import failure_block, last_lines
from burst_cli.runs.read import run_record
from cluster.control.attempt import StopRequests, find_controller
from cluster.failure import failure_from_dict
from engine.config.errors import RunError
from engine.runs.folder import FINAL_STATES, RunFolder
from engine.runs.record import python_path

CONTROLLER_LOG = "controller.log"
START, TAKE_OVER = "start", "take-over"
_POLL_S = 0.05


def launch_detached(run: RunFolder, stop: StopRequests, console: Console, *, as_json: bool, start: bool = True) -> int:
    """0 once the nodes of `run` are led by a process in the background, else the exit code of what went wrong.

    start: False takes over what runs. A request to stop that comes before the nodes run is passed on. Raises RunError
    when that process ends without a word in run.json.
    """
    attempt = run.read_state()["attempt"]
    process = _spawn(run, START if start else TAKE_OVER)
    passed_on = 0
    while not (begun := _has_started(run, process, attempt, start=start)) and process.poll() is None:
        if stop.count > passed_on:
            passed_on = stop.count
            process.send_signal(signal.SIGTERM)
        time.sleep(_POLL_S)
    if begun and not passed_on:
        if not as_json:
            text = f"it goes on in the background, led by process {process.pid}"
            render.say(console, Text(text, style="dim"))
        lines = [f"burst {verb} {run.run_id}" for verb in ("status", "logs", "cancel")]
        document = {**run_record(run), "detached": True, "controller_pid": process.pid}
        render.show(document, *lines, as_json=as_json)
        return 0
    code = process.wait()
    state = run.read_state()
    if state["state"] not in FINAL_STATES:
        lines = last_lines(str(run.path / CONTROLLER_LOG), 5)
        said = "\n".join(lines)
        raise RunError(f"The controller in the background ended with exit code {code} before the nodes ran: {said}")
    failure = failure_from_dict(state.get("failure"))
    if failure is not None:
        render.say(console, failure_block(run, failure))
    ended = [f"{state['state']} {run.exp}/{run.run_id}"] if failure is None else []
    render.show({**run_record(run), "exit_code": code, "detached": False}, *ended, as_json=as_json)
    return code


def _spawn(run: RunFolder, way: str) -> subprocess.Popen[bytes]:
    """The process in the background, in a session of its own, so that a closed terminal does not reach it."""
    # Where it is started there may be a folder of the name of a package: it must not be imported.
    environment = {**os.environ, "PYTHONPATH": python_path()}
    descriptor = os.open(run.path / CONTROLLER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "burst_cli.launch.launching", str(run.path), way],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _has_started(run: RunFolder, process: subprocess.Popen[bytes], attempt: int, *, start: bool) -> bool:
    """Whether the process leads the run, and all nodes have begun, or a scheduler has a job that may wait for hours."""
    controller = find_controller(run)
    if controller is None or controller.pid != process.pid:
        return False
    state = run.read_state()
    is_this_attempt = not start or state["state"] in ("starting", "running")
    has_started = state.get("nodes_started_at") is not None or state.get("job") is not None
    return is_this_attempt and state["attempt"] >= attempt and (not start or has_started)
