"""python -m cluster.launch.slurm.time_limit RUN TOKEN WORD, in the batch file of a job whose time is nearly up.

stop: the supervisors are asked for the end, so that ranks save. go-on: they have ended, or Slurm runs the job again;
where no launcher is there to do so, the next attempt is begun as a new job, as often as a launcher would.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cluster.agent.folder import request_stop
from cluster.control.attempt import find_controller, read_cancel
from cluster.control.link import TIME_LIMIT
from cluster.errors import ClusterError
from cluster.launch.slurm.client import CONF_VARIABLE
from cluster.launch.slurm.plan import granted_plan, read_token
from cluster.launch.slurm.sbatch import WARNING_S
from cluster.plan import read_launch_plan
from engine.config.errors import BurstError
from engine.runs.folder import RunFolder

_BEGIN_S = WARNING_S / 2
_LAUNCHER_S = 10.0  # a launcher pauses before the next attempt, and nobody leads the run meanwhile


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """0, or 1 with the reason on stderr; of go-on the exit code of `burst resume`."""
    run, token, word = RunFolder(Path(arguments[0])), arguments[1], arguments[2]
    try:
        if read_token(run.path) != token:
            raise ClusterError(f"{run.path} has been given to another job since")
        if word == "stop":
            _stop(run, token)
        elif _may_go_on(run, token):
            # It returns once the new job is in the queue; it must not believe itself in an allocation to be used.
            outside = {name: environment[name] for name in environment if name[:6] != "SLURM_" or name == CONF_VARIABLE}
            words = (sys.executable, "-P", "-m", "burst_cli", "resume", str(run.path), "--detach", "--plain")
            return subprocess.run(words, env=outside, check=False).returncode
    except (BurstError, OSError) as error:
        print(f"burst: {word}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _stop(run: RunFolder, token: str) -> None:
    """Ask all nodes of this attempt, for which it waits: before they have begun they hear nothing."""
    plan, deadline = read_launch_plan(run.path), time.monotonic() + _BEGIN_S
    while (granted := granted_plan(plan, run, token)) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"not all nodes have begun within {_BEGIN_S:g} s")
        time.sleep(0.1)
    for node in granted.nodes:
        request_stop(str(run.path), node.name, TIME_LIMIT, plan.config.train.checkpoint.stop_grace_s)


def _may_go_on(run: RunFolder, token: str) -> bool:
    """Whether nobody else begins the next attempt, or wants none, and not too many in a row have saved nothing."""
    attempts, most = run.attempts(), read_launch_plan(run.path).config.cluster.max_restarts
    idle = len(list(itertools.takewhile(lambda attempt: not _has_saved(attempt), reversed(attempts))))
    if idle + (idle < len(attempts)) > most:
        print(f"burst: no further checkpoint after {most} restarts in a row", file=sys.stderr)
        return False
    deadline = time.monotonic() + _LAUNCHER_S
    while read_token(run.path) == token and find_controller(run) is None:
        if read_cancel(run) is not None or run.read_state()["state"] in ("cancelled", "completed"):
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def _has_saved(attempt: RunFolder) -> bool:
    return any(event.get("kind") == "checkpoint" for event in attempt.read_events())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
