"""From the words after `burst launch` to a plan that may be carried out: which launcher, which nodes, does it fit.

Shown by --dry-run, it is the very value that would be run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burst_cli import render
from burst_cli.compose import compose
from burst_cli.launch.sources import check_room, check_source, quote_source, with_source_path
from burst_cli.options import LaunchRequest, select_nodes
from cluster.control.runner import Survey, SurveyOptions, runner_for
from cluster.plan import LaunchPlan, with_exclusive
from cluster.ssh.hosts import fold_nodes
from engine.config.settings import RunConfig
from engine.resolve.legality import check_run
from engine.runs.checkpoints import CheckpointError, check_steps_left, find_source, list_checkpoints
from engine.runs.folder import check_writable, new_run_path

if TYPE_CHECKING:
    from burst_cli.plan.memory_check import MemoryCheck


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
    # Loads the planner and the predictor, which a launch whose nodes do not answer never needs.
    from burst_cli.launch.resolve import expected_time, resolve_plan

    plan, memory = resolve_plan(plan, survey.hardware, force=request.force)
    if request.force:
        plan = with_exclusive(plan, exclusive=False)
    # Of a scheduler's nodes nothing is known yet that would tell how fast they are.
    notes = () if runner.is_queued else expected_time(memory, request)
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
