"""The runner protocol: what differs between launchers. No other module asks for the name of a launcher.

survey    what is known of the machines, and what may be planned for them      Runner.survey
prepare   what they lack before anything starts                                Survey.prepare
start     nodes are asked for, and their ranks begin                           Runner.await_nodes, NodeLink.start
status    how every node is                                                    NodeLink.poll
stop      the end, in order or at once                                         NodeLink.stop, NodeLink.sweep
fetch     logs and figures come into the run folder, unless they lie in it     NodeLink.follow
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.plan import LaunchPlan, read_launch_plan

if TYPE_CHECKING:
    from cluster.control.attempt import StopRequests
    from cluster.control.link import LaunchObserver, LaunchOutcome, NodeLink
    from engine.config.cluster import ClusterConfig
    from engine.config.settings import RunConfig
    from engine.predict.memory import Hardware
    from engine.runs.folder import RunFolder

# The module with `RUNNER` and the module with `open_links`, per launcher. Launchers are plugins of this protocol: found
# by name and imported on first use, so that a local run does not import SSH and reading a plan imports no links.
RUNNERS = {
    "local": ("cluster.launch.local", "cluster.launch.local"),
    "ssh": ("cluster.launch.ssh", "cluster.control.ssh_link"),
    "slurm": ("cluster.launch.slurm.runner", "cluster.launch.scheduler"),
    "kubernetes": ("cluster.launch.kubernetes.runner", "cluster.launch.scheduler"),
}


@dataclass(frozen=True)
class SurveyOptions:
    """What was typed beside the configuration.

    nodes: in the order of their ranks; None: those of cluster.nodes. health: that of the machines is looked at. busy:
    shows what is waited for. module: what every rank runs. resumed: id of the run, if it has begun.
    """

    nodes: tuple[str, ...] | None = None
    overrides: tuple[str, ...] = ()
    force: bool = False
    dry_run: bool = False
    health: bool = False
    busy: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
    module: str = "engine.train"
    resumed: str | None = None


@dataclass(frozen=True)
class Survey:
    """What is known of the machines of one launch, and so what would be started there.

    config: with paths as the ranks read them. plan: of a configuration and a run folder that is not yet there; raises
    ConfigError. hardware: what every machine has at least; None: as much as this one. warnings: what is odd. complete:
    a plan that nothing is added to any more, with the files that follow from all of it. prepare: bring to the machines
    what they lack for a plan.
    """

    config: RunConfig
    plan: Callable[[RunConfig, Path], LaunchPlan]
    hardware: Hardware | None = None
    warnings: tuple[str, ...] = ()
    complete: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan
    prepare: Callable[[LaunchPlan], None] = lambda plan: None


class Runner(ABC):
    """One launcher. What is not abstract here is for those whose plans name their nodes.

    is_here: ranks are processes of this machine. is_queued: nodes are waited for in the queue of a scheduler, which
    also ends them; else their leases do. takes_nodes: people name nodes, which are asked again before every attempt.
    """

    is_here = is_queued = takes_nodes = False

    @abstractmethod
    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        """What a launch must know; changes nothing anywhere. Raises ConfigError, UnfitNodesError, ClusterError."""

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        """`plan` with the nodes that it got, as far as they are known by now. Raises PlanFileError."""
        return plan

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> tuple[LaunchPlan, Sequence[NodeLink]] | LaunchOutcome | None:
        """The plan with its nodes and links to them, once there are some, or the outcome of a run that got none; None:
        the plan and its links are as they were. start: ask for nodes; else go on with what was asked for."""
        return None


def runner_for(cluster: ClusterConfig) -> Runner:
    """The runner that these settings mean."""
    return _runner(cluster.resolved_launcher)


def runner_of(plan: LaunchPlan) -> Runner:
    """The runner of the launcher that `plan` names."""
    return _runner(plan.launcher)


def read_run_plan(run_path: Path) -> LaunchPlan:
    """Read the plan of a run, with the nodes that its scheduler has granted by now. Raises PlanFileError."""
    plan = read_launch_plan(run_path)
    return runner_of(plan).with_nodes(plan)


def open_links(plan: LaunchPlan, run: RunFolder) -> Sequence[NodeLink]:
    """A link per node of `plan`, in its order; nothing is connected yet. Their user closes every one of them.

    Raises HostsError when SSH no longer knows a node, ClusterError when Slurm does not answer.
    """
    links: Sequence[NodeLink] = importlib.import_module(RUNNERS[plan.launcher][1]).open_links(plan, run)
    return links


def _runner(name: str) -> Runner:
    return cast(Runner, importlib.import_module(RUNNERS[name][0]).RUNNER)
