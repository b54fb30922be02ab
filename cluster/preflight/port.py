"""The port of the rendezvous of a run that starts again: the one it had may be somebody else's by now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.access.connection import Connection
from cluster.access.hosts import Host
from cluster.access.resolve import resolve_hosts
from cluster.errors import ClusterError
from cluster.plan import LaunchPlan, NodePlan
from cluster.preflight.bundle import ask_program
from cluster.preflight.survey import MODULES

_OPTION = "--master-port="
_ANSWER_S = 60.0


def with_free_port(plan: LaunchPlan, connect: Callable[[Host], Connection]) -> LaunchPlan:
    """`plan`, whose ranks meet at a port that is free on the first node now.

    As it is where its configuration names the port, and where the ranks find one themselves: on this machine, under
    Slurm. Raises ClusterError when the node does not tell.
    """
    if plan.launcher != "ssh" or plan.config.cluster.master_port is not None:
        return plan
    (host,) = resolve_hosts([plan.nodes[0].name], plan.config.cluster.ssh)
    with connect(host) as connection:
        found = ask_program(connection, (*MODULES, "cluster.preflight.node.port"), {}, timeout_s=_ANSWER_S).get("port")
    if not isinstance(found, int) or not 0 < found < 65536:
        raise ClusterError(f"{host.name}: it names no free port for the rendezvous")
    return replace(plan, nodes=tuple(_meeting_at(node, found) for node in plan.nodes))


def _meeting_at(node: NodePlan, port: int) -> NodePlan:
    words = (f"{_OPTION}{port}" if word.startswith(_OPTION) else word for word in node.argv)
    return replace(node, argv=tuple(words))
