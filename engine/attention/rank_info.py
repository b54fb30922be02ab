"""Which ranks share sequences, on which machines, and whether all of them were given the same."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.config.errors import ConfigError
from engine.distributed.collectives import gather_objects
from engine.planning.topology import Topology


@dataclass(frozen=True)
class RankInfo:
    """What every rank tells all others: the ranks it shares sequences with, where it works, and its settings."""

    ranks: tuple[int, ...]
    host: str
    device: str
    settings: tuple[object, ...]


def all_gather_rank_info(
    group: dist.ProcessGroup | None, device: torch.device, settings: tuple[object, ...]
) -> list[RankInfo]:
    """The `RankInfo` of all ranks of the world; ConfigError, on every rank alike, when they do not fit together."""
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError("group: got a process group, but torch.distributed is not initialised")
        return [RankInfo((0,), socket.gethostname(), device_name(device), settings)]
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    local = RankInfo(tuple(ranks), socket.gethostname(), device_name(device), settings)
    infos: list[RankInfo] = gather_objects(local)
    problems = []
    for rank, info in enumerate(infos):
        if rank not in info.ranks:
            problems.append(
                f"group: rank {rank} gave the group of ranks {list(info.ranks)}, to which it does not belong"
            )
        for member in info.ranks:
            if infos[member].ranks != info.ranks:
                problems.append(
                    f"group: rank {rank} shares its sequences with ranks {list(info.ranks)}, but rank {member} with "
                    f"{list(infos[member].ranks)}; every rank must give the one group that it belongs to"
                )
            elif infos[member].settings != info.settings and member > rank:
                problems.append(
                    f"settings: ranks {rank} and {member} share their sequences, but gave {info.settings} and "
                    f"{infos[member].settings}; give the same everywhere"
                )
    if problems:
        raise ConfigError(problems)
    return infos


def find_topology(hosts: Sequence[str], nodes: int | None) -> Topology:
    """Nodes x local ranks of a group whose ranks lie on these machines, in order.

    Where the machines have unequal shares, or a machine's ranks are no neighbours, every rank counts as its own node.
    """
    if nodes is not None:
        if nodes < 1 or len(hosts) % nodes:
            legal = ", ".join(str(n) for n in range(1, len(hosts) + 1) if len(hosts) % n == 0)
            raise ConfigError(
                f"nodes: got {nodes}, which does not divide the group's {len(hosts)} ranks; legal: {legal}"
            )
        return Topology(nodes, len(hosts) // nodes)
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    if len(runs) == len(set(hosts)) and len(set(runs)) == 1:
        return Topology(len(runs), runs[0])
    return Topology(len(hosts), 1)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
