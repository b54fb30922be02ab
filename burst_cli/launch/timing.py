"""How long a step is expected to take, said before a launch; on CPUs, minutes per step are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from burst_cli.figures import duration, seconds
from burst_cli.runs.read import run_record
from burst_cli.sweep.estimate import Estimate, LaunchJudge, Measured, measured_runs
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.folder import list_runs

MOST_STEP_S = 300.0  # of a step on CPUs: longer ones are a configuration for GPUs that was started by mistake
_NEWEST = 50  # runs that are looked at for a measured rate
_LEAST_SEQ_LEN = 128


def newest_measured(runs_dir: Path) -> list[Measured]:
    """The newest runs that were measured."""
    return measured_runs(run_record(run) for run in list_runs(runs_dir)[-_NEWEST:])


def expected_time(config: RunConfig, judge: LaunchJudge) -> tuple[str, ...]:
    """What to say of the time that settled `config` takes, or nothing where it cannot be told.

    Raises ConfigError where a step on CPUs takes longer than MOST_STEP_S, unless the judge is told to force it.
    """
    found = None if config.train.evaluate_only else judge.estimate(config)
    if found is None:
        return ()
    step = f"{_time(found.step_s)} per step"
    whole = f"{duration(found.seconds)} for {config.train.steps} steps and the start"
    told = f"expected: {step}, {whole}, by {found.source}"
    if config.cluster.backend == "gloo" and found.step_s > MOST_STEP_S and not judge.force:
        raise ConfigError(
            f"too slow: {step} is expected on the CPU, by {found.source}; expected at most {_time(MOST_STEP_S)}. "
            f"Run it where GPUs are, choose a smaller model{_shorter(config, judge)}. To start it all the same, add "
            "--force."
        )
    return (told,)


def _shorter(config: RunConfig, judge: LaunchJudge) -> str:
    """The longest sequence, by halves, whose step is short enough."""
    length = config.train.seq_len // 2
    while length >= _LEAST_SEQ_LEN:
        found: Estimate | None = judge.estimate(replace(config, train=replace(config.train, seq_len=length)))
        if found is not None and found.step_s <= MOST_STEP_S:
            return f", or train.seq_len={length} ({_time(found.step_s)} per step)"
        length //= 2
    return ""


def _time(value: float) -> str:
    return seconds(value) if value < 60 else f"{duration(value)} min" if value < 3600 else f"{duration(value)} h"
