"""Which nodes a verb works on, and the options that say so; shared by every verb that reaches nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burst_cli.options import ConfigDirOption, OverridesArgument

if TYPE_CHECKING:
    from cluster.ssh.hosts import Host
    from cluster.ssh.nodes import NodeList
    from engine.config.settings import RunConfig

HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", "-w", metavar="NODES", help="Nodes, such as node[1-4,7]; default: cluster.nodes."),
]
HostfileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with one node per line, instead of --hosts.")
]


@dataclass(frozen=True)
class Targets:
    """What a verb works on. source: where the list of nodes came from, in words."""

    config: RunConfig
    hosts: tuple[Host, ...]
    source: str


@dataclass(frozen=True)
class NodeOptions:
    """What a verb that reaches nodes is told on the command line of the configuration and of nodes."""

    overrides: OverridesArgument = None
    hosts: HostsOption = None
    hostfile: HostfileOption = None
    config_dir: ConfigDirOption = None

    def select(self, *, or_here: bool = False, local: bool = False) -> Targets:
        """The composed configuration and the nodes: of --hosts, --hostfile, cluster.nodes or Slurm, the first given.

        or_here: where none is, this machine is meant, and there are no hosts; local: that is so whatever is named.
        Raises ConfigError (HostsError among them) when none is, or when a name or the way to it makes no sense.
        """
        from burst_cli.compose import compose
        from cluster.ssh.nodes import slurm_nodes
        from cluster.ssh.resolve import resolve_hosts

        overrides = self.overrides or ()
        config = compose(overrides, self.config_dir or ()).config
        is_named = any(one is not None for one in (self.hosts, self.hostfile, config.cluster.nodes))
        if local or (or_here and not is_named and slurm_nodes(os.environ) is None):
            return Targets(config, (), "this machine")
        nodes = select_nodes(config, hosts=self.hosts, hostfile=self.hostfile)
        return Targets(config, resolve_hosts(nodes.names, config.cluster.ssh, overrides), nodes.source)


def select_nodes(config: RunConfig, *, hosts: str | None, hostfile: Path | None) -> NodeList:
    """The names alone."""
    from cluster.errors import HostsError
    from cluster.ssh.nodes import parse_nodes, read_hostfile, slurm_nodes

    if hosts is not None and hostfile is not None:
        raise HostsError("--hosts and --hostfile both name nodes; give one of them")
    if hosts is not None:
        return parse_nodes(hosts, "--hosts")
    if hostfile is not None:
        return read_hostfile(hostfile)
    if config.cluster.nodes is not None:
        return parse_nodes(config.cluster.nodes, "cluster.nodes")
    if (allocation := slurm_nodes(os.environ)) is not None:
        return allocation
    raise HostsError(
        "no nodes are named: give --hosts node[1-4], --hostfile FILE or cluster=NAME (a file in conf/cluster/ with "
        "`nodes:`), or start burst inside a Slurm allocation; `burst testbed up` makes nodes to try things on"
    )
