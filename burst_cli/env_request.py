"""From the words after `burst env` to the environments of the nodes that they mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.access.hosts import Host
    from cluster.env.ask import FleetEnvironment
    from engine.config import RunConfig

LOG_BYTES = 64 << 20


@dataclass(frozen=True)
class EnvRequest:
    """What was given on the command line about nodes."""

    overrides: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()
    hosts: str | None = None
    hostfile: Path | None = None


@dataclass(frozen=True)
class Found:
    """What came of the nodes; source: where their names came from, in words."""

    fleet: FleetEnvironment
    source: str


def ask(request: EnvRequest, *, node: str | None = None, run: Path | None = None, with_live: bool = False) -> Found:
    """The environments of the nodes that are meant; of this machine when no node is named anywhere.

    All nodes are asked even if `node` picks a few, because rails are compared across nodes.
    """
    from burst_cli import render
    from cluster.env.ask import ask_fleet

    config, hosts, source = _targets(request)
    if hosts:
        _chosen(node, [host.name for host in hosts])
    log_dir = str(run.absolute() / "logs") if run is not None else None
    console = render.stderr()
    with console.status(
        f"asking {len(hosts) or 'this'} {'node' if len(hosts) == 1 else 'nodes' if hosts else 'machine'}"
    ):
        fleet = ask_fleet(hosts, config.cluster, with_live=with_live, log_dir=log_dir)
    return Found(_only(fleet, node), source)


def read_log(path: Path) -> str:
    """The text of a log of NCCL; its beginning, should it be huge, for NCCL says at the start what it uses."""
    from engine.errors import ConfigError

    if not path.is_file():
        raise ConfigError(f"--nccl-log {path}: no such file; NCCL writes one where NCCL_DEBUG_FILE says")
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode("utf-8", errors="replace")


def _targets(request: EnvRequest) -> tuple[RunConfig, tuple[Host, ...], str]:
    """(configuration, hosts, where their names came from)."""
    from burst_cli.compose import compose
    from burst_cli.targets import select_nodes
    from cluster.access.nodes import slurm_nodes
    from cluster.access.resolve import resolve_hosts

    config = compose(request.overrides, request.config_dirs).config
    named = request.hosts is not None or request.hostfile is not None or config.cluster.nodes is not None
    if not named and slurm_nodes(os.environ) is None:
        return config, (), "this machine"
    nodes = select_nodes(config, hosts=request.hosts, hostfile=request.hostfile)
    return config, tuple(resolve_hosts(nodes.names, config.cluster.ssh, request.overrides)), nodes.source


def _only(fleet: FleetEnvironment, node: str | None) -> FleetEnvironment:
    """The part of `fleet` that --node names."""
    chosen = _chosen(node, [*fleet.environments, *fleet.errors])

    def keep(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in table.items() if name in chosen}

    return replace(fleet, environments=keep(fleet.environments), live=keep(fleet.live), errors=keep(fleet.errors))


def _chosen(node: str | None, names: Sequence[str]) -> set[str]:
    """The names that --node picks; all without it. Raises HostsError for one that is none of them."""
    from cluster.access.nodes import fold_nodes, parse_nodes
    from cluster.errors import HostsError

    wanted = set(names) if node is None else set(parse_nodes(node, "--node").names)
    if not wanted <= set(names):
        unknown = fold_nodes(sorted(wanted - set(names)))
        raise HostsError(f"--node {node}: {unknown} is none of the nodes; they are {fold_nodes(names)}")
    return wanted
