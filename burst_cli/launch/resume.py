"""`burst resume`: go on with a run."""

from __future__ import annotations

from typing import Annotated

import typer

from burst_cli.app import new_verb
from burst_cli.options import LaunchRequest, LivingRunArgument, OutputOptions
from engine.config.errors import ConfigError

app = new_verb()


@app.command()
def resume(
    request: LaunchRequest,
    options: OutputOptions,
    run: LivingRunArgument = None,
    settings: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> int:
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

    words = [word for word in (run, *(settings or ())) if word is not None]
    if given := [word for word in words if "=" in word]:
        name = next((word for word in words if "=" not in word), "RUN")
        raise ConfigError(
            f"burst resume {' '.join(words)}: a run continues with the configuration it was launched with, so it "
            f"takes no settings. To train on from its weights with others: burst launch exp=NAME "
            f"train.checkpoint.resume_from={name} {' '.join(given)}"
        )
    if settings:
        raise ConfigError(f"burst resume takes one run, got {' '.join(words)}")
    return resume_run(choose_run(run, request.runs_dir, living=True), request, options)
