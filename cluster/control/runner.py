"""How a run comes to its nodes: one `Runner` per launcher. Nobody else asks which launcher a plan names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cluster.control.link import NodeLink
from cluster.control.local_link import LocalLink
from cluster.control.outcome import LaunchObserver, LaunchOutcome
from cluster.control.ssh_link import LinkTiming, NodePlace, SshLink
from cluster.control.stopping import StopRequests
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host
from engine.runs.folder import RunFolder, typed_overrides

if TYPE_CHECKING:
    from cluster.plan import LaunchPlan
    from cluster.ssh.pool import SshPool

# A connection that is silent for three of these is dead: long before a lease is over.
_KEEPALIVE_S = 5.0
_STALL_S = 15.0
_JUMP_RETRY_S = 5.0


class Runner(Protocol):
    """What differs between launchers once a run is planned.

    is_queued: nodes are waited for in the queue of a scheduler, which also ends them; else their leases do.
    """

    is_queued: bool

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        """`plan` with the nodes that it got, as far as they are known by now. Raises PlanFileError."""

    def links(self, plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None) -> list[NodeLink]:
        """See `open_links`."""

    def await_nodes(
        self, plan: LaunchPlan, run: RunFolder, observer: LaunchObserver, stop: StopRequests, *, start: bool
    ) -> tuple[LaunchPlan, Sequence[NodeLink]] | LaunchOutcome | None:
        """The plan with its nodes and links to them, once there are some, or the outcome of a run that got none; None:
        the plan and its links are as they were. start: ask for nodes; else go on with what was asked for."""

    def goes_on(self, outcome: LaunchOutcome) -> bool:
        """Whether the next attempt of a run that ended so is begun by somebody else, and to be led from here."""


class _NamedNodes:
    """Of launchers whose plans name their nodes."""

    is_queued = False

    def with_nodes(self, plan: LaunchPlan) -> LaunchPlan:
        return plan

    def await_nodes(self, *_: object, start: bool) -> None:
        return None

    def goes_on(self, outcome: LaunchOutcome) -> bool:
        return False


class LocalRunner(_NamedNodes):
    """Ranks of this machine."""

    def links(self, plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None) -> list[NodeLink]:
        return [LocalLink(run.path, node.name) for node in plan.nodes]


class SshRunner(_NamedNodes):
    """Ranks on nodes that are reached by SSH."""

    def links(self, plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None) -> list[NodeLink]:
        # Only who goes to other machines pays for what that takes.
        from cluster.ssh.pool import SshPool
        from cluster.ssh.resolve import resolve_hosts

        hosts = resolve_hosts([node.name for node in plan.nodes], plan.config.cluster.ssh, typed_overrides(run.path))
        pool = SharedPool(SshPool(keepalive_s=_KEEPALIVE_S, stall_s=_STALL_S, jump_retry_s=_JUMP_RETRY_S), len(hosts))
        links: list[NodeLink] = []
        for host, node in zip(hosts, plan.nodes, strict=True):
            place = NodePlace(run.path, node.name, node.folder, lead=node.node_rank == 0)
            links.append(SshLink(host, pool, place, timing or LinkTiming(), on_end=pool.leave))
        return links


def runner_of(plan: LaunchPlan) -> Runner:
    """The runner of the launcher that `plan` names."""
    if plan.launcher == "slurm":
        from cluster.slurm.runner import SlurmRunner

        return SlurmRunner()
    return SshRunner() if plan.launcher == "ssh" else LocalRunner()


def open_links(plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None = None) -> list[NodeLink]:
    """A link per node of `plan`, in its order; nothing is connected yet. Their user closes every one of them.

    Raises HostsError when SSH no longer knows a node, ClusterError when Slurm does not answer.
    """
    return runner_of(plan).links(plan, run, timing)


class SharedPool:
    """A pool for so many users that ends with the last of them."""

    def __init__(self, pool: SshPool, users: int) -> None:
        self._pool, self._users = pool, users
        self._lock = threading.Lock()

    def connect(self, host: Host) -> Connection:
        """A connection of the pool."""
        return self._pool.connect(host)

    def leave(self) -> None:
        """One user needs no more connections."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._pool.close()
