"""The links of a plan: one per node, by the launcher that the plan names."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cluster.access.connection import Connection
from cluster.access.hosts import Host
from cluster.control.link import NodeLink
from cluster.control.local_link import LocalLink
from cluster.control.ssh_link import LinkTiming, NodePlace, SshLink
from engine.runs.folder import RunFolder, typed_overrides

if TYPE_CHECKING:
    from cluster.access.ssh import SshPool
    from cluster.plan import LaunchPlan

# A connection that is silent for three of these is dead: long before a lease is over.
_KEEPALIVE_S = 5.0
_STALL_S = 15.0
_JUMP_RETRY_S = 5.0


def open_links(plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None = None) -> list[NodeLink]:
    """A link per node of `plan`, in its order; nothing is connected yet. Their user closes every one of them.

    Raises HostsError when SSH no longer knows a node, ClusterError when Slurm does not answer.
    """
    if plan.launcher == "slurm":
        from cluster.slurm.link import slurm_links

        return slurm_links(plan, run)
    if plan.launcher == "ssh":
        return _ssh_links(plan, run, timing or LinkTiming())
    return [LocalLink(run.path, node.name) for node in plan.nodes]


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


def _ssh_links(plan: LaunchPlan, run: RunFolder, timing: LinkTiming) -> list[NodeLink]:
    # Only who goes to other machines pays for what that takes.
    from cluster.access.resolve import resolve_hosts
    from cluster.access.ssh import SshPool

    hosts = resolve_hosts([node.name for node in plan.nodes], plan.config.cluster.ssh, typed_overrides(run.path))
    pool = SharedPool(SshPool(keepalive_s=_KEEPALIVE_S, stall_s=_STALL_S, jump_retry_s=_JUMP_RETRY_S), len(hosts))
    links: list[NodeLink] = []
    for host, node in zip(hosts, plan.nodes, strict=True):
        place = NodePlace(run.path, node.name, node.folder, lead=node.node_rank == 0)
        links.append(SshLink(host, pool, place, timing, on_end=pool.leave))
    return links
