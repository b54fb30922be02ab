"""From the words after `burst launch` to a plan that may be carried out: which launcher, which nodes, does it fit.

Data of a run whose ranks are on this machine are prepared here, too, before anything of the run is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from burst_cli import render
from burst_cli.compose import compose
from burst_cli.figures import duration, seconds
from burst_cli.launch.request import LaunchRequest
from burst_cli.plan.memory_check import MemoryCheck, MemoryPlanner, check_memory, group_topology, with_memory
from burst_cli.sweep.estimate import estimate
from burst_cli.targets import select_nodes
from cluster.launch.runner import Asked, Survey, runner_for
from cluster.plan import LaunchPlan, with_exclusive
from cluster.ssh.nodes import fold_nodes
from engine.config.errors import ConfigError
from engine.config.rules import check_config
from engine.config.settings import RunConfig
from engine.planning.sequence.layers import check_attention
from engine.planning.time.machine import find_machine, machine_fields
from engine.runs.folder import check_writable, new_run_path

MOST_STEP_S = 300.0  # of a step on CPUs: longer ones are a configuration for GPUs that was started by mistake


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that was found fit. overrides: those that spell this configuration, nodes included. survey: of the
    machines, which may still lack what the plan starts there. notes: what a person should know before."""

    plan: LaunchPlan
    memory: MemoryCheck
    overrides: tuple[str, ...]
    survey: Survey
    notes: tuple[str, ...] = ()


def prepare_launch(request: LaunchRequest) -> PreparedLaunch:
    """The launch that `request` means. Nothing is created anywhere.

    Raises ConfigError for what was asked for, UnfitNodesError for nodes that cannot do it.
    """
    nodes, overrides = None, request.overrides
    if request.names_nodes:  # in their order; the record of a run says which they were
        nodes = select_nodes(RunConfig(), hosts=request.hosts, hostfile=request.hostfile).names
        overrides = (*overrides, f"cluster.nodes='{fold_nodes(nodes)}'")
    composed = compose(overrides, request.config_dirs, request.base)
    given = request.run_path
    run_path = new_run_path(request.runs_dir, composed.config.exp) if given is None else given.absolute()
    if not request.dry_run:
        check_writable(run_path)  # before anybody is asked
    runner = runner_for(composed.config.cluster)
    health = not (request.skip_checks or request.dry_run)
    asked = Asked(nodes, request.overrides, request.force, request.dry_run, health, render.stderr().status)
    survey = runner.survey(composed.config, asked)
    planner = MemoryPlanner(survey.hardware)
    memory = _settled_memory(survey.plan(survey.config, run_path).config, planner, force=request.force)
    plan = with_memory(survey.plan(_with_policy(survey.config, memory), run_path), memory)
    if request.force:
        plan = with_exclusive(plan, exclusive=False)
    # Of a scheduler's nodes nothing is known yet that would tell how fast they are.
    is_patient = request.force or request.dry_run
    notes = () if runner.is_queued else _expected_time(memory.config, planner, is_patient=is_patient)
    return PreparedLaunch(survey.complete(plan), memory, composed.overrides, survey, composed.notes + notes)


def _settled_memory(config: RunConfig, planner: MemoryPlanner, *, force: bool) -> MemoryCheck:
    """The check of memory, with memory=auto settled, of a configuration that knows its ranks.

    Raises ConfigError, also for rules that only now apply.
    """
    check_config(config)  # once more: the number of ranks is known only now
    check_attention(config, group_topology(config))
    return check_memory(planner.settle_attention(config), planner, force=force)


def _with_policy(config: RunConfig, memory: MemoryCheck) -> RunConfig:
    """`config` with the policy of memory that was chosen. attention=auto stays: the ranks settle it themselves.

    But not by a measured profile, which lies here: they get the method, and its figures.
    """
    settled, given = replace(config, memory=memory.config.memory), config.cluster.machine
    if not given.name.endswith(".json"):
        return settled
    machine = find_machine(given.name)
    rates = tuple(f"{name}={float(getattr(machine, name))!r}" for name in (*machine_fields(), "shared_nic"))
    measured = replace(given, name="cpu" if machine.is_cpu else "auto", rates=(*rates, *given.rates))
    cluster = replace(config.cluster, machine=measured)
    return replace(settled, attention=memory.config.attention, cluster=cluster)


def _expected_time(config: RunConfig, planner: MemoryPlanner, *, is_patient: bool) -> tuple[str, ...]:
    """What to say of the time that settled `config` takes, or nothing where it cannot be told.

    Raises ConfigError where a step on CPUs takes longer than MOST_STEP_S, unless `is_patient`.
    """
    found = None if config.train.evaluate_only else estimate(config, planner)
    if found is None:
        return ()
    step = f"{_time(found.step_s)} per step"
    if config.cluster.backend == "gloo" and found.step_s > MOST_STEP_S and not is_patient:
        raise ConfigError(
            f"too slow: {step} is expected on the CPU, by {found.source}; expected at most {_time(MOST_STEP_S)}. Run "
            "it where GPUs are, choose a smaller model or a shorter sequence. To start it all the same, add --force."
        )
    whole = f"{duration(found.seconds)} for {config.train.steps} steps and the start"
    return (f"expected: {step}, {whole}, by {found.source}",)


def _time(value: float) -> str:
    return seconds(value) if value < 60 else f"{duration(value)} min" if value < 3600 else f"{duration(value)} h"


def prepare_data(config: RunConfig, console: Console) -> None:
    """Tokenise what is not tokenised yet; check that the model knows every token and that samples can be drawn.

    Raises ConfigError or DataError before anything was started.
    """
    from burst_cli.data.progress import show_progress  # nodes prepare theirs, and who asks them needs nothing for it
    from engine.data.needles import needle_tasks
    from engine.data.prepare import open_training_data, prepare

    with show_progress(console) as report:
        prepared = prepare(config.data, progress=report)
    vocab_size = prepared.train.manifest.vocab_size
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small: the data has tokens up to "
            f"{vocab_size - 1}. Set model.vocab_size={vocab_size} or more."
        )
    if not config.train.evaluate_only:
        open_training_data(config.data).sampler(config.train.seq_len, config.seed, grad_accum_steps=1)
    needle_tasks(config, prepared)
