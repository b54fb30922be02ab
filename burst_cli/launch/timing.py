"""How long a step is expected to take, said before a launch; on CPUs, minutes per step are refused."""

from __future__ import annotations

from burst_cli.figures import duration, seconds
from burst_cli.plan.memory_check import MemoryPlanner
from burst_cli.sweep.estimate import estimate
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig

MOST_STEP_S = 300.0  # of a step on CPUs: longer ones are a configuration for GPUs that was started by mistake


def expected_time(config: RunConfig, planner: MemoryPlanner, *, force: bool) -> tuple[str, ...]:
    """What to say of the time that settled `config` takes, or nothing where it cannot be told.

    Raises ConfigError where a step on CPUs takes longer than MOST_STEP_S, unless `force`.
    """
    found = None if config.train.evaluate_only else estimate(config, planner)
    if found is None:
        return ()
    step = f"{_time(found.step_s)} per step"
    whole = f"{duration(found.seconds)} for {config.train.steps} steps and the start"
    told = f"expected: {step}, {whole}, by {found.source}"
    if config.cluster.backend == "gloo" and found.step_s > MOST_STEP_S and not force:
        raise ConfigError(
            f"too slow: {step} is expected on the CPU, by {found.source}; expected at most {_time(MOST_STEP_S)}. "
            f"Run it where GPUs are, choose a smaller model or a shorter sequence. To start it all the same, add "
            "--force."
        )
    return (told,)


def _time(value: float) -> str:
    return seconds(value) if value < 60 else f"{duration(value)} min" if value < 3600 else f"{duration(value)} h"
