"""`burst resume`: go on with a run."""

from __future__ import annotations

from burst_cli.app import new_verb
from burst_cli.options import LaunchManner, LaunchRequest, LivingRunArgument

app = new_verb()


@app.command()
def resume(request: LaunchRequest, manner: LaunchManner, run: LivingRunArgument = None) -> int:
    """Go on with a run: take it over where it still runs, else start its next attempt.

    A run whose launcher was killed goes on until its lease ends (cluster.lease_s); taken over in time, it loses
    nothing. A run that has ended starts again as the next attempt of the same run, with the same configuration: from
    its newest checkpoint where there is one, else from step 1. Nodes reached by SSH are asked as for a launch and get
    the code of this installation; --hosts names others, such as a sound one in the place of one that died. A run that
    a living process controls is left alone.

    Exit codes as of `burst launch`: 0 completed, 1 failed, 2 configuration, 130 interrupted.
    """
    from burst_cli.launch.take_over import resume_run
    from burst_cli.runs.choose import choose_run

    return resume_run(choose_run(run, request.runs_dir, living=True), request, manner)
