"""The next attempt of a run: its plan made anew for nodes as they are now, and how often it is begun by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from burst_cli.launch.request import LaunchRequest, PreparedLaunch, prepare_launch
from cluster.checks.launch import UnfitNodesError
from cluster.control.attempt import Restarts, StopRequests
from cluster.control.controller import Manner
from cluster.control.link import LaunchObserver, LaunchOutcome
from cluster.launch.runner import runner_of
from cluster.plan import LaunchPlan, write_plan_files
from cluster.ssh.nodes import parse_nodes
from engine.config.errors import BurstError, ConfigError
from engine.runs.folder import RunFolder

_FUTILE = ("config", "user", "start")  # what another attempt would end of as well
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0

Lead = Callable[[LaunchPlan, Manner], LaunchOutcome]
Renew = Callable[[LaunchPlan, RunFolder], LaunchPlan]


def renewed_plan(plan: LaunchPlan, run: RunFolder, request: LaunchRequest | None = None) -> LaunchPlan:
    """The plan of another attempt of `run`, written into its folder: nodes reached by SSH are asked as for a launch,
    and get the code of this installation.

    request: --hosts or --hostfile in place of the nodes it had, --force, --skip-checks; without, cluster.spare_nodes
    take the place of those that are not fit. Where ranks need no such thing, the plan is as it was. Raises
    ConfigError, UnfitNodesError and CodeError.
    """
    request = request or LaunchRequest()
    if not runner_of(plan).takes_nodes:
        if request.hosts is not None or request.hostfile is not None:
            raise ConfigError(f"run {run.run_id} is of launcher {plan.launcher}, so it takes no --hosts or --hostfile")
        return plan
    base = replace(plan.config, cluster=replace(plan.config.cluster, num_nodes=None))
    force = request.force or not plan.is_exclusive
    request = replace(request, run_path=run.path, base=base, force=force)
    if request.hosts is None and request.hostfile is None:
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
    manner: Manner,
    renew: Renew = renewed_plan,
) -> LaunchOutcome:
    """The outcome of the last attempt: `lead` leads one, and while it fails the next begins from the last checkpoint.

    At most cluster.max_restarts times in a row without a checkpoint more than the attempt before.
    """
    observer, stop = watchers
    restarts, allowed = Restarts(), plan.config.cluster.max_restarts
    while True:
        outcome = lead(plan, manner)
        kind = outcome.failure.kind if outcome.failure is not None else None
        if outcome.status != "failed" or kind in _FUTILE or stop.count or not allowed:
            return outcome
        restarts = restarts.after(run)
        while (count := restarts.in_a_row) <= allowed:
            where = f"from the checkpoint of step {restarts.saved}" if restarts.saved else "from the beginning"
            observer.note(f"{kind}: restart {count} of {allowed} without progress, {where}")
            if _is_stopped(min(_PAUSE_S * 2 ** (count - 1), _LONGEST_PAUSE_S), stop, manner):
                return outcome
            try:
                plan, manner = renew(plan, run), replace(manner, start=True)
                break
            except BurstError as error:
                observer.note(f"the nodes cannot take it up: {error}")
                restarts = replace(restarts, in_a_row=count + 1)
        else:
            return outcome


def _is_stopped(seconds: float, stop: StopRequests, manner: Manner) -> bool:
    """Whether somebody asks for the end in the next so many seconds."""
    end = manner.clock.monotonic() + seconds
    while manner.clock.monotonic() < end and not stop.count:
        manner.clock.sleep(0.1)
    return stop.count > 0
