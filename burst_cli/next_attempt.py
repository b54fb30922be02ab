"""The next attempt of a run: its plan made anew for nodes as they are now, and how often it is begun by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from burst_cli.launch_request import LaunchRequest, prepare_launch
from cluster.control.attempt import Restarts
from cluster.control.controller import Manner
from cluster.control.outcome import LaunchObserver, LaunchOutcome
from cluster.control.stopping import StopRequests
from cluster.plan import LaunchPlan
from cluster.plan_record import write_plan_files
from engine.errors import BurstError, ConfigError
from engine.runs import RunFolder

_FUTILE = ("config", "user", "start")  # what another attempt would end of as well
_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0

Lead = Callable[[LaunchPlan, Manner], LaunchOutcome]
Renew = Callable[[LaunchPlan, RunFolder], LaunchPlan]


def renewed_plan(plan: LaunchPlan, run: RunFolder, request: LaunchRequest | None = None) -> LaunchPlan:
    """The plan of another attempt of `run`, written into its folder: nodes reached by SSH are asked as for a launch,
    and get the code of this installation.

    request: --hosts or --hostfile in place of the nodes it had, --force, --skip-checks. Where ranks need no such thing,
    the plan is as it was. Raises ConfigError, UnfitNodesError and CodeError.
    """
    request = request or LaunchRequest()
    if plan.launcher != "ssh":
        if request.hosts is not None or request.hostfile is not None:
            raise ConfigError(f"run {run.run_id} is of launcher {plan.launcher}, so it takes no --hosts or --hostfile")
        return plan
    if request.hosts is None and request.hostfile is None:
        request = replace(request, hosts=",".join(node.name for node in plan.nodes))
    base = replace(plan.config, cluster=replace(plan.config.cluster, num_nodes=None))
    force = request.force or not plan.is_exclusive
    prepared = prepare_launch(replace(request, run_path=run.path, base=base, force=force))
    if prepared.fleet is not None:
        prepared.fleet.lay_code()
    write_plan_files(prepared.plan, run)
    return prepared.plan


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
