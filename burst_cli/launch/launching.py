"""A launch, from its request to the end of its last attempt: planned, shown or run, led, told of.

The plan of another attempt is made anew for nodes as they are then; how often one is begun by itself is counted here.
`python -m burst_cli.launch.launching RUN start|take-over` leads a run that was left to the background.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.launch.prepare import PreparedLaunch, prepare_launch
from burst_cli.options import LaunchRequest, OutputOptions
from burst_cli.render import clean
from burst_cli.runs.nccl_network import fallback_text, socket_fallbacks
from burst_cli.runs.read import RunProgress, is_evaluation, run_record
from burst_cli.runs.view import open_view
from burst_cli.terminal import use_any_encoding
from cluster.checks.launch import UnfitNodesError
from cluster.control.attempt import Restarts, StopRequests
from cluster.control.controller import ControlOptions, control
from cluster.control.judge import last_checkpoint
from cluster.control.link import LaunchObserver, LaunchOutcome, LaunchTiming
from cluster.control.runner import open_links, read_run_plan, runner_of
from cluster.plan import LaunchPlan, write_plan_files
from cluster.ssh.hosts import parse_nodes
from engine.config.errors import BurstError, ConfigError
from engine.config.settings import RunConfig
from engine.runs.figures import DASH, binary_bytes, count, count_of, duration, percent, plain
from engine.runs.files import json_text
from engine.runs.folder import OVERRIDES_FILE, RunFolder, create_run, open_run
from engine.runs.record import collect_provenance

_NON_RETRYABLE = ("config", "user", "start")  # what another attempt would end of as well
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_TIMING = LaunchTiming()

Lead = Callable[[LaunchPlan, ControlOptions], LaunchOutcome]
Renew = Callable[[LaunchPlan, RunFolder], LaunchPlan]


def renewed_plan(plan: LaunchPlan, run: RunFolder, request: LaunchRequest | None = None) -> LaunchPlan:
    """The plan of another attempt of `run`, written into its folder: nodes reached by SSH are asked as for a launch,
    and get the code of this installation.

    request: --hosts or --hostfile in place of the nodes it had, --force, --skip-checks; without, cluster.spare_nodes
    take the place of those that are not fit. Where ranks need no such thing, the plan is as it was, and so is what
    was resolved. Raises ConfigError, UnfitNodesError and CodeError.
    """
    request = request or LaunchRequest()
    if not runner_of(plan).takes_nodes:
        if request.names_nodes:
            raise ConfigError(f"run {run.run_id} is of launcher {plan.launcher}, so it takes no --hosts or --hostfile")
        return plan
    base = replace(plan.config, cluster=replace(plan.config.cluster, num_nodes=None))
    force = request.force or not plan.is_exclusive
    request = replace(request, run_path=run.path, base=base, force=force)
    if not request.names_nodes:
        named = base.cluster.spare_nodes
        spares = () if named is None else parse_nodes(named, "cluster.spare_nodes").names
        names = tuple(node.name for node in plan.nodes)
        prepared = with_spares(lambda names: prepare_launch(replace(request, hosts=",".join(names))), names, spares)
    else:
        prepared = prepare_launch(request)
    prepared.survey.prepare(prepared.plan)
    write_plan_files(prepared.plan, run)
    return prepared.plan


def with_spares(
    prepare: Callable[[tuple[str, ...]], PreparedLaunch], names: tuple[str, ...], spares: Sequence[str]
) -> PreparedLaunch:
    """What `prepare` gives for nodes `names`, of which those that are not fit have been replaced by `spares` in order.

    Raises UnfitNodesError when there are not enough.
    """
    left = [spare for spare in spares if spare not in names]
    while True:
        try:
            return prepare(names)
        except UnfitNodesError as error:
            unfit = {name for problem in error.problems for name in problem.nodes}.intersection(names)
            if not 0 < len(unfit) <= len(left):
                raise
            names = tuple(left.pop(0) if name in unfit else name for name in names)


def lead_attempts(
    plan: LaunchPlan,
    run: RunFolder,
    watchers: tuple[LaunchObserver, StopRequests],
    lead: Lead,
    options: ControlOptions,
    renew: Renew = renewed_plan,
) -> LaunchOutcome:
    """The outcome of the last attempt: `lead` leads one, and while it fails the next begins from the last checkpoint.

    At most cluster.max_restarts times in a row without a checkpoint more than the attempt before.
    """
    observer, stop = watchers
    restarts, allowed = Restarts(), plan.config.cluster.max_restarts
    while True:
        outcome = lead(plan, options)
        kind = outcome.failure.kind if outcome.failure is not None else None
        if outcome.status != "failed" or kind in _NON_RETRYABLE or stop.count or not allowed:
            return outcome
        restarts = restarts.after(run)
        while (count := restarts.in_a_row) <= allowed:
            observer.note(f"{kind}: {_restart_text(restarts, allowed)}")
            if _is_stopped(min(_PAUSE_S * 2 ** (count - 1), _LONGEST_PAUSE_S), stop, options):
                return outcome
            try:
                plan, options = renew(plan, run), replace(options, start=True)
                break
            except BurstError as error:
                observer.note(f"the nodes cannot take it up: {error}")
                restarts = replace(restarts, in_a_row=count + 1)
        else:
            return outcome


def _restart_text(restarts: Restarts, allowed: int) -> str:
    """Where another attempt begins, and how many more may fail without a further checkpoint."""
    where = f"from the checkpoint of step {restarts.saved}" if restarts.saved else "from the beginning"
    if restarts.saved and restarts.in_a_row == 1:  # counted anew, because there is a further checkpoint
        return f"restart {where}; {allowed} in a row are tried until there is a further checkpoint"
    return f"restart {restarts.in_a_row} of {allowed} without progress, {where}"


def _is_stopped(seconds: float, stop: StopRequests, options: ControlOptions) -> bool:
    """Whether somebody asks for the end in the next so many seconds."""
    end = options.clock.monotonic() + seconds
    while options.clock.monotonic() < end and not stop.count:
        options.clock.sleep(0.1)
    return stop.count > 0


def prepare_data(config: RunConfig, console: Console) -> None:
    """Tokenise what is not tokenised yet; check that the model knows every token and that samples can be drawn.

    Raises ConfigError or DataError before anything was started.
    """
    from burst_cli.data.progress import show_progress  # nodes prepare theirs, and who asks them needs nothing for it
    from engine.data.agreement import vocabulary_problem
    from engine.data.needles import needle_tasks
    from engine.data.prepare import open_training_data, prepare

    with show_progress(console) as report:
        prepared = prepare(config.data, progress=report)
    if problem := vocabulary_problem(config, prepared.train.manifest.vocab_size):
        raise ConfigError(problem)
    if not config.train.evaluate_only:
        open_training_data(config.data).sampler(config.train.seq_len, config.seed, grad_accum_steps=1)
    needle_tasks(config, prepared)


def run_plan(plan: LaunchPlan, overrides: Sequence[str], options: OutputOptions, timing: LaunchTiming = _TIMING) -> int:
    """The exit code of the launch that `plan` describes; progress on stderr, the result on stdout.

    Nothing is created when the data cannot be prepared; from then on every end is recorded in the run folder. Nodes
    other than this machine prepare their data themselves.
    """
    console, is_here = options.console(), runner_of(plan).is_here
    if is_here:
        prepare_data(plan.config, console)
    typed, provenance = "".join(f"{override}\n" for override in overrides), json_text(collect_provenance())
    files = {**dict(plan.files), OVERRIDES_FILE: typed, "provenance.json": provenance}
    where = "" if is_here else f" on {count_of('node', len(plan.nodes))}"
    ranks = f"{count_of('rank', plan.world_size)}{where}, {plan.backend.name} ({plan.backend.reason})"
    stop = StopRequests()
    with stop.listening():
        run = create_run(Path(plan.run_path), files, world_size=plan.world_size)
        render.say(console, Text.assemble((_name(run), "bold"), f"  {ranks}"), Text(str(run.path), "dim"))
        if options.detach:
            from burst_cli.launch.detach import launch_detached

            return launch_detached(run, stop, console, as_json=options.as_json)
        return lead_run(plan, run, stop, options, timing=timing)


def lead_run(
    plan: LaunchPlan,
    run: RunFolder,
    stop: StopRequests,
    options: OutputOptions,
    *,
    start: bool = True,
    timing: LaunchTiming = _TIMING,
) -> int:
    """The exit code of `run`, shown while it lives and told of at its end. start: False takes over what runs."""
    progress = RunProgress(run, plan.config.train.steps)
    with open_view(options.console(), progress, is_log=options.detach) as view:
        outcome = lead_attempts(
            plan,
            run,
            (view, stop),
            lambda plan, led: control(plan, run, open_links(plan, run), view, stop, led),
            ControlOptions(start=start, timing=timing, detached=options.detach),
        )
    conclude(run, outcome, progress.elapsed_s(), last_checkpoint(run, plan), as_json=options.as_json)
    return outcome.exit_code


def conclude(run: RunFolder, outcome: LaunchOutcome, elapsed_s: float, saved: str | None, *, as_json: bool) -> None:
    """Say how it ended: a failure on stderr, the result on stdout. saved: the last checkpoint."""
    record, fallbacks, views = run_record(run), socket_fallbacks(run), list[RenderableType]()
    warnings = [fallback_text(fallbacks), *(f"may still run: {clean(str(one))}" for one in outcome.leftover)]
    told: list[RenderableType] = [Text(f"warning: {text}", style="yellow") for text in warnings if text]
    if outcome.failure is not None:
        from burst_cli.runs.failure import failure_block

        told.insert(0, failure_block(run, outcome.failure))
    render.say(render.stderr(), *told)
    if outcome.failure is None:
        style, result = "green" if outcome.status == "completed" else "yellow", result_line(record)
        weights = saved or "nothing was saved; train.checkpoint.at_end=true saves them"
        views = [Text.assemble((outcome.status, style), f" {_name(run)} in {duration(elapsed_s)}")]
        more = f"more: burst report {run.run_id}"
        if is_evaluation(record):
            from burst_cli.runs.evaluation import evaluation_view

            views += [evaluation_view(record), more]
        else:
            views += [result, more, f"weights: {clean(weights)}"]
    ended = {"exit_code": outcome.exit_code, "leftover": [*map(str, outcome.leftover)]}
    with render.reader_may_leave():  # the exit code tells how the run ended, not whether somebody read of it
        render.show({**record, **ended, "socket_fallback": fallbacks}, *views, as_json=as_json)


def result_line(record: dict[str, Any]) -> str:
    """The figures a person asks for first, in one line."""
    dropped = record.get("dropped_steps")
    parts = [
        f"{count_of('step', record.get('steps') or 0)}{f' ({dropped} dropped)' if dropped else ''}",
        f"train loss {plain(record.get('final_train_loss'))}",
        f"validation loss {plain(record.get('final_validation_loss'))}",
        f"bits/byte {plain(record.get('final_validation_bits_per_byte'))}",
        f"tokens/s per device {count(record.get('tokens_per_s_per_device'))}",
        f"MFU {percent(record.get('mfu'))}",
        f"peak memory {binary_bytes(record.get('peak_memory_bytes'))}",
    ]
    return "  ".join(part for part in parts if not part.endswith(DASH))


def _name(run: RunFolder) -> str:
    return f"{run.exp}/{run.run_id}"


# --- in the background ------------------------------------------------------------------------------------------------


def main(run_path: str, way: str) -> int:
    """The exit code of a run that this process leads in the background; what a person can mend is told in one line."""
    from burst_cli.launch.detach import START

    use_any_encoding()
    stop = StopRequests()
    with stop.listening():
        try:
            run, options = open_run(Path(run_path)), OutputOptions(detach=True)
            return lead_run(read_run_plan(run.path), run, stop, options, start=way == START)
        except BurstError as error:
            return render.fail(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
