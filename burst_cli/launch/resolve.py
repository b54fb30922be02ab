"""What a planned launch will run: resolved for its ranks, checked against memory and time, written into the plan.

Loads the planner and the predictor, so `prepare` imports it only after the nodes have answered.
"""

from __future__ import annotations

from dataclasses import replace

from burst_cli.options import LaunchRequest
from burst_cli.plan.memory_check import MEMORY_PLAN_FILE, MemoryCheck, MemoryPlanner, check_memory, estimate
from burst_cli.runs.starts import earlier_start_s
from cluster.plan import CONFIG_FILE, LaunchPlan, with_files
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, dump_config
from engine.predict.machine import find_machine, machine_fields
from engine.predict.memory import Hardware
from engine.resolve.run import resolved_text
from engine.runs.figures import count_of, duration, seconds
from engine.runs.files import json_text
from engine.runs.folder import RESOLVED_FILE
from engine.runs.record import config_fingerprint

MOST_STEP_S = 300.0  # of a step on CPUs: longer ones are a configuration for GPUs that was started by mistake


def resolve_plan(plan: LaunchPlan, hardware: Hardware | None, *, force: bool) -> tuple[LaunchPlan, MemoryCheck]:
    """Resolve the configuration of `plan` for its ranks; return the plan with the files of that, and the memory check.

    hardware: of the machines of the ranks; None: this one. Raises ConfigError where it does not fit, unless `force`.
    """
    planner = MemoryPlanner(hardware)
    memory = check_memory(planner.resolve(plan.config), planner, force=force)
    return with_run(plan, memory), memory


def with_run(plan: LaunchPlan, memory: MemoryCheck) -> LaunchPlan:
    """`plan` with what its ranks read: what was asked for, what that was resolved to, what was predicted."""
    asked, run = _with_local_rates(plan.config), memory.run
    run = replace(run, config=_with_local_rates(run.config), requested=config_fingerprint(asked))
    return with_files(
        replace(plan, config=asked),
        (CONFIG_FILE, dump_config(asked)),
        (RESOLVED_FILE, resolved_text(run)),
        (MEMORY_PLAN_FILE, json_text(memory.to_dict())),
    )


def _with_local_rates(config: RunConfig) -> RunConfig:
    """`config` with the figures of a measured profile in the place of its file, which is on this machine alone."""
    given = config.cluster.machine
    if not given.name.endswith(".json"):
        return config
    machine = find_machine(given.name)
    rates = tuple(f"{name}={float(getattr(machine, name))!r}" for name in (*machine_fields(), "shared_nic"))
    measured = replace(given, name="cpu" if machine.is_cpu else "auto", rates=(*rates, *given.rates))
    return replace(config, cluster=replace(config.cluster, machine=measured))


def expected_time(memory: MemoryCheck, request: LaunchRequest) -> tuple[str, ...]:
    """Return a note on how long the run takes, or nothing where that cannot be predicted.

    Raises ConfigError where a step on CPUs takes longer than MOST_STEP_S, unless it is forced or a dry run.
    """
    config = memory.config
    start_s = earlier_start_s(request.runs_dir, config.exp, config.cluster.world_size, request.run_path)
    expected = None if config.train.evaluate_only else estimate(memory.run, memory.step, start_s)
    if expected is None:
        return ()
    step = f"{_time(expected.step_s)} per step"
    allows_slow = request.force or request.dry_run
    if config.cluster.backend == "gloo" and expected.step_s > MOST_STEP_S and not allows_slow:
        raise ConfigError(
            f"too slow: {step} is expected on the CPU, by {expected.source}; expected at most {_time(MOST_STEP_S)}. "
            "Run it where GPUs are, choose a smaller model or a shorter sequence. To start it all the same, add "
            "--force."
        )
    whole = f"{duration(expected.seconds)} for {count_of('step', config.train.steps)}"
    return (f"expected: {step}, {whole}, by {expected.source}",)


def _time(value: float) -> str:
    return (
        seconds(value) if value < 60 else f"{duration(value)} (h:mm:ss)" if value >= 3600 else f"{value / 60:.3g} min"
    )
