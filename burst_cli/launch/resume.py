"""`burst resume`: go on with a run."""

from __future__ import annotations

import typer

from burst_cli.app import new_verb
from burst_cli.options import (
    RUNS_DIR,
    DetachOption,
    ForceOption,
    JsonOption,
    LivingRunArgument,
    PlainOption,
    RunsDirOption,
    SkipChecksOption,
)
from burst_cli.targets import HostfileOption, HostsOption

app = new_verb()


@app.command()
def resume(
    run: LivingRunArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    force: ForceOption = False,
    skip_checks: SkipChecksOption = False,
    detach: DetachOption = False,
    plain: PlainOption = False,
    runs_dir: RunsDirOption = RUNS_DIR,
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
    from burst_cli.launch.launching import LaunchManner
    from burst_cli.launch.request import LaunchRequest
    from burst_cli.launch.take_over import resume_run
    from burst_cli.runs.choose import choose_run

    chosen = choose_run(run, runs_dir, living=True)
    request = LaunchRequest(hosts=hosts, hostfile=hostfile, force=force, skip_checks=skip_checks)
    raise typer.Exit(resume_run(chosen, request, LaunchManner(detach=detach, plain_lines=plain, as_json=as_json)))
