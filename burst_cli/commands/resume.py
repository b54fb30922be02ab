"""`burst resume`: go on with a run."""

from __future__ import annotations

from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.completion import complete_run
from burst_cli.options import ForceOption, JsonOption, RunsDirOption, SkipChecksOption
from burst_cli.targets import HostfileOption, HostsOption

app = new_verb()


@app.command()
def resume(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run id (or how it begins, or its last six digits), EXP, EXP/ID or folder; none: the run that lives.",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    force: ForceOption = False,
    skip_checks: SkipChecksOption = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Lead it by a process in the background, and return at once.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Progress as lines, also on a terminal.")] = False,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run: take it over where it still runs, else start its next attempt.

    A run whose launcher was killed goes on until its lease ends (cluster.lease_s); taken over in time, it loses
    nothing. A run that has ended starts again as the next attempt of the same run, with the same configuration: from
    its newest checkpoint where there is one, else from step 1. Nodes reached by SSH are asked as for a launch and get
    the code of this installation; --hosts names others, such as a sound one in the place of one that died. A run that
    a living process controls is left alone.

    Exit codes as of `burst launch`: 0 completed, 1 failed, 2 configuration, 130 interrupted.
    """
    from burst_cli.launch_request import LaunchRequest
    from burst_cli.runs.choose import choose_run
    from burst_cli.runs.resume import ResumeManner, resume_run

    chosen = choose_run(run, runs_dir, living=True)
    request = LaunchRequest(hosts=hosts, hostfile=hostfile, force=force, skip_checks=skip_checks)
    raise typer.Exit(resume_run(chosen, ResumeManner(request, detach=detach, plain_lines=plain, as_json=as_json)))
