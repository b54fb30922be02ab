"""From the words after `burst env` to the environments of the nodes that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.env.ask import FleetEnvironment

LOG_BYTES = 64 << 20


@dataclass(frozen=True)
class EnvRequest:
    """What was given on the command line. node: which of the nodes; run: the run folder that logs go to."""

    overrides: Sequence[str] | None
    config_dirs: Sequence[Path] | None
    hosts: str | None
    hostfile: Path | None
    node: str | None
    run: Path | None


def ask(request: EnvRequest, *, with_live: bool = False) -> tuple[FleetEnvironment, str]:
    """(environments of the nodes that are meant, where their names came from); of this machine when none is named.

    All nodes are asked even if `request.node` picks a few, because rails are compared across nodes.
    """
    from burst_cli import render
    from burst_cli.targets import select_targets
    from cluster.env.ask import ask_fleet

    targets = select_targets(
        request.overrides or (),
        request.config_dirs or (),
        hosts=request.hosts,
        hostfile=request.hostfile,
        or_here=True,
    )
    hosts, node = targets.hosts, request.node
    if hosts:
        _chosen(node, [host.name for host in hosts])
    log_dir = str(request.run.absolute() / "logs") if request.run is not None else None
    what = f"{len(hosts)} node{'s'[: len(hosts) - 1]}" if hosts else "this machine"
    with render.stderr().status(f"asking {what}"):
        fleet = ask_fleet(hosts, targets.config.cluster, with_live=with_live, log_dir=log_dir)
    chosen = _chosen(node, [*fleet.environments, *fleet.errors])

    def keep(table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in table.items() if name in chosen}

    kept = replace(fleet, environments=keep(fleet.environments), live=keep(fleet.live), errors=keep(fleet.errors))
    return kept, targets.source


def read_log(path: Path) -> str:
    """The text of a log of NCCL; its beginning, should it be huge, for NCCL says at the start what it uses."""
    from engine.config.errors import ConfigError

    if not path.is_file():
        raise ConfigError(f"--nccl-log {path}: no such file; NCCL writes one where NCCL_DEBUG_FILE says")
    with path.open("rb") as file:
        return file.read(LOG_BYTES).decode("utf-8", errors="replace")


def _chosen(node: str | None, names: Sequence[str]) -> set[str]:
    """The names that --node picks; all without it. Raises HostsError for one that is none of them."""
    from cluster.errors import HostsError
    from cluster.ssh.nodes import fold_nodes, parse_nodes

    wanted = set(names) if node is None else set(parse_nodes(node, "--node").names)
    if not wanted <= set(names):
        unknown = fold_nodes(sorted(wanted - set(names)))
        raise HostsError(f"--node {node}: {unknown} is none of the nodes; they are {fold_nodes(names)}")
    return wanted
