"""From the words after `burst launch` to a plan that may be carried out: which launcher, which nodes, does it fit.

Shown by --dry-run, it is the very value that would be run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from burst_cli import render
from burst_cli.compose import compose
from burst_cli.launch.sources import check_room, check_source, quote_source, with_source_path
from burst_cli.options import LaunchRequest, select_nodes
from burst_cli.plan.decisions import preset_words
from burst_cli.plan.memory_check import (
    MEMORY_PLAN_FILE,
    MemoryCheck,
    MemoryPlanner,
    check_memory,
    estimate,
)
from burst_cli.plan.table import candidates_table
from burst_cli.runs.starts import earlier_start_s
from cluster.control.runner import Survey, SurveyOptions, runner_for, runner_of
from cluster.plan import CONFIG_FILE, PLAN_FILE, LaunchPlan, with_exclusive, with_files
from cluster.ssh.hosts import fold_nodes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, dump_config
from engine.predict.machine import find_machine, machine_fields
from engine.resolve.legality import check_run
from engine.resolve.run import resolved_text
from engine.runs.checkpoints import CheckpointError, check_steps_left, find_source, list_checkpoints
from engine.runs.figures import count_of, duration, seconds
from engine.runs.files import json_text
from engine.runs.folder import RESOLVED_FILE, check_writable, new_run_path
from engine.runs.record import config_fingerprint

MOST_STEP_S = 300.0  # of a step on CPUs: longer ones are a configuration for GPUs that was started by mistake

_ORDER = ("plan.sh", "job.sbatch", "job.yaml", "env/", "config.yaml")
_MOST_ENVIRONMENTS = 2  # shown to people; all are in --json


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
    nodes, overrides = None, quote_source(request.overrides)
    if request.names_nodes:  # in their order; the record of a run says which they were
        nodes = select_nodes(RunConfig(), hosts=request.hosts, hostfile=request.hostfile).names
        overrides = (*overrides, f"cluster.nodes='{fold_nodes(nodes)}'")
    composed = compose(overrides, request.config_dirs, request.base)
    resolved = with_source_path(overrides, composed, request.runs_dir)
    if resolved != overrides:
        composed = compose(resolved, request.config_dirs, request.base)
    _check_continuation(composed.config)
    given = request.run_path
    run_path = new_run_path(request.runs_dir, composed.config.exp) if given is None else given.absolute()
    if not request.dry_run:
        check_writable(run_path)  # before anybody is asked
    runner = runner_for(composed.config.cluster)
    health = not (request.skip_checks or request.dry_run)
    room: tuple[str, ...] = ()
    if runner.is_here and not request.dry_run:
        check_source(composed.config)
        room = check_room(composed.config, run_path, force=request.force)
    resumed = given.name if given is not None and request.base is not None else None
    typed, busy = request.overrides, render.stderr().status
    asked = SurveyOptions(nodes, typed, request.force, request.dry_run, health, busy, resumed=resumed)
    survey = runner.survey(composed.config, asked)
    plan = survey.plan(survey.config, run_path)
    check_run(plan.config)  # once more: the number of ranks is known only now
    planner = MemoryPlanner(survey.hardware)
    memory = check_memory(planner.resolve(plan.config), planner, force=request.force)
    plan = with_run(plan, memory)
    if request.force:
        plan = with_exclusive(plan, exclusive=False)
    # Of a scheduler's nodes nothing is known yet that would tell how fast they are.
    allow_slow = request.force or request.dry_run
    start_s = earlier_start_s(request.runs_dir, composed.config.exp, memory.config.cluster.world_size, given)
    notes = () if runner.is_queued else _expected_time(memory, start_s, allow_slow=allow_slow)
    return PreparedLaunch(survey.complete(plan), memory, composed.overrides, survey, composed.notes + room + notes)


def _check_continuation(config: RunConfig) -> None:
    """Raises ConfigError where train.checkpoint.resume_from, as this machine sees it, has no step left to do."""
    source = config.train.checkpoint.resume_from
    if source is None or config.train.evaluate_only:
        return
    try:
        root, step = find_source(Path(source).expanduser())
    except CheckpointError:  # it may exist on the nodes alone: the ranks check it again
        return
    check_steps_left(list_checkpoints(root)[0].step if step is None else step, source, config.train.steps)


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


def _expected_time(memory: MemoryCheck, start_s: float | None, *, allow_slow: bool) -> tuple[str, ...]:
    """What to say of the time that a run takes, or nothing where it cannot be predicted.

    Raises ConfigError where a step on CPUs takes longer than MOST_STEP_S, unless `allow_slow`.
    """
    config = memory.config
    found = None if config.train.evaluate_only else estimate(memory.run, memory.step, start_s)
    if found is None:
        return ()
    step = f"{_time(found.step_s)} per step"
    if config.cluster.backend == "gloo" and found.step_s > MOST_STEP_S and not allow_slow:
        raise ConfigError(
            f"too slow: {step} is expected on the CPU, by {found.source}; expected at most {_time(MOST_STEP_S)}. Run "
            "it where GPUs are, choose a smaller model or a shorter sequence. To start it all the same, add --force."
        )
    whole = f"{duration(found.seconds)} for {count_of('step', config.train.steps)}"
    return (f"expected: {step}, {whole}, by {found.source}",)


def _time(value: float) -> str:
    return (
        seconds(value) if value < 60 else f"{duration(value)} (h:mm:ss)" if value >= 3600 else f"{value / 60:.3g} min"
    )


def show_plan(
    plan: LaunchPlan,
    memory: MemoryCheck | None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """Print the plan on stdout: run folder, nodes, backend, memory; then command, environment, configuration as files.

    `warnings`: what is odd about the nodes, `notes`: what is good to know; on stderr with --json.
    """
    if as_json:
        render.stderr().print(launch_notes(None, warnings, notes), soft_wrap=True, end="")
        render.emit_json({**plan.to_dict(), **({} if memory is None else {"memory": memory.to_dict()})})
        return
    console = render.stdout()
    console.print(Text.assemble(("run folder  ", "bold"), plan.run_path, ("  (dry run: not created)", "yellow")))
    render.say(console, Text.assemble(("ranks       ", "bold"), _ranks(plan)))
    console.print(Text.assemble(("backend     ", "bold"), f"{plan.backend.name}, {plan.backend.reason}"))
    if memory is not None:
        render.say(console, Text.assemble(("memory      ", "bold"), f"{memory.needs}, by the prediction"))
    console.print(launch_notes(memory, warnings, notes), soft_wrap=True, end="")
    if memory is not None and memory.decision.candidates:
        console.print(candidates_table(memory))
    shown, left_out = _shown_files(plan)
    for name, text in shown:
        render.say(console, Text(f"\n{name}", style="bold"), "\n".join(f"  {line}" for line in text.splitlines()))
    if left_out:
        console.print(Text(f"\n{left_out} more files like {plan.nodes[0].env_file}: see --json", style="dim"))


def show_job(plan: LaunchPlan, form: str) -> None:
    """Print the job of `plan` as YAML. Raises ConfigError for a plan that has none."""
    from cluster.launch.kubernetes.manifest import FORMS, JOB_FILE

    if JOB_FILE not in dict(plan.files):
        raise ConfigError(f"--as {form} needs cluster.launcher=kubernetes, as in cluster=k8s")
    print(FORMS[form](plan), end="")


def _ranks(plan: LaunchPlan) -> str:
    """How many ranks there are where, nodes folded."""
    if len(plan.nodes) == 1:
        return f"{count_of('rank', plan.world_size)} on {plan.nodes[0].name}"
    names = fold_nodes(node.name for node in plan.nodes)
    return f"{count_of('rank', plan.world_size)} on {len(plan.nodes)} nodes ({names}), by {plan.launcher}"


def _shown_files(plan: LaunchPlan) -> tuple[list[tuple[str, str]], int]:
    """(files in the order to show them, how many environments are left out). What stands above is no part of them."""
    files = [file for file in plan.files if file[0] not in (MEMORY_PLAN_FILE, RESOLVED_FILE, PLAN_FILE)]
    files.sort(key=lambda file: next((place for place, name in enumerate(_ORDER) if file[0].startswith(name)), 99))
    if runner_of(plan).takes_nodes:  # where no file is a script that shows it
        first = plan.nodes[0]
        files.insert(0, (f"command on {first.name}", shlex.join(first.argv)))
    left_out = [file for file in files if file[0].startswith("env/")][_MOST_ENVIRONMENTS:]
    left_out = left_out if len(left_out) > 1 else []
    return [file for file in files if file not in left_out], len(left_out)


def launch_notes(memory: MemoryCheck | None, warnings: Sequence[str] = (), notes: Sequence[str] = ()) -> Text:
    """What a person should know before: `notes`, what was chosen for auto, warnings; one line each, may be empty."""
    said = Text("".join(f"{note}\n" for note in notes))
    if memory is not None and memory.run.decision("attention.preset").candidates:
        said.append(f"attention={preset_words(memory.run.decision('attention.preset'))}\n")
    if memory is not None and memory.decision.candidates:
        said.append(f"memory.activation_checkpoint={memory.reason}\n")
    told = () if memory is None else (*memory.warnings, *memory.problems)
    for text in (*warnings, *told):
        said.append(f"warning: {text}\n", style="yellow")
    return said
