"""All-reduce and all-to-all over all ranks by size, then every pair of nodes by itself; see `engine.collectives`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from engine.bench.measure import exchange, slowest_rank, synchronize
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.parallel.mesh import check_world, choose_device, read_placement, start_process_group
from engine.runs.folder import RunFolder
from engine.training.rank.lifecycle import run_states
from engine.training.rank.process import RankStatus

SIZES = tuple(1 << bits for bits in range(16, 29, 2))
PAIR_BYTES = 1 << 22
_REPEATS = 5
_LONG_S = 0.1  # a size that takes so long is measured once, and is the last


def measure_collectives(config: RunConfig, run: RunFolder, status: RankStatus) -> None:
    """Everything a rank does; that of rank 0 leaves what was found in summary.json."""
    placement = read_placement()
    with run_states(run, status, rank=placement.rank):
        status.phase = "start"
        check_world(config.cluster, placement)  # of fewer ranks than were asked for a figure would be of something else
        if placement.world_size < 2:
            raise ConfigError("collectives need two ranks: name two nodes or more, or set cluster.ranks_per_node=2")
        device = choose_device(config.cluster, placement)
        start_process_group(device, placement)
        status.phase = "collectives"
        found = {"collectives": sweep(device), "pairs": exchange_pairs(device, placement.local_world_size)}
        if placement.rank == 0:
            run.write_summary(found)
        dist.destroy_process_group()


def sweep(device: torch.device, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Per operation and size the seconds of the slowest rank, and busbw as nccl-tests count it; collective."""
    size = dist.get_world_size()
    rows = []
    # Of what an operation sends, the share that crosses links: its busbw can be compared with the rate of a link.
    for name, operate, share in (
        ("all_reduce", _all_reduce, 2 * (size - 1) / size),
        ("all_to_all", _all_to_all, (size - 1) / size),
    ):
        for num_bytes in sizes:
            count = num_bytes // 4 // size * size
            seconds = _seconds(device, operate(torch.zeros(count, device=device)))
            (slowest,) = slowest_rank([seconds])
            busbw_gbps = 32e-9 * count / slowest * share
            rows.append({"operation": name, "bytes": 4 * count, "seconds": slowest, "busbw_gbps": busbw_gbps})
            if slowest > _LONG_S:
                break
    return rows


def exchange_pairs(device: torch.device, per_node: int) -> list[dict[str, Any]]:
    """Per pair of nodes what their slowest ranks send to each other, both ways at once; disjoint pairs run together.

    Every rank talks to the one in its place on the other node. Collective.
    """
    rank, size, rows = dist.get_rank(), dist.get_world_size(), []
    own, seat = divmod(rank, per_node)
    for pairs in plan_rounds(size // per_node):
        other = next((sum(pair) - own for pair in pairs if own in pair), None)
        partner = None if other is None else other * per_node + seat
        sent = torch.zeros(PAIR_BYTES // 4, device=device)
        operation = (lambda: None) if partner is None else exchange(sent, partner, partner)
        seconds = [0.0] * size
        seconds[rank] = _seconds(device, operation)
        by_rank = slowest_rank(seconds)
        for one, two in pairs:
            slowest = max(by_rank[node * per_node + local] for node in (one, two) for local in range(per_node))
            rows.append({"nodes": [one, two], "gbps": 8e-9 * PAIR_BYTES / slowest})
    return rows


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` nodes exactly once, in rounds in which no node is part of two pairs.

    The way of round-robin tournaments: the first stays, the others move on by one place.

        round 0: 0-3 1-2    round 1: 0-2 1-3    round 2: 0-1 2-3
    """
    places = list(range(count + count % 2))
    rounds = []
    for _ in places[1:]:
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in facing if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _seconds(device: torch.device, operation: Callable[[], object]) -> float:
    """Seconds that `operation` takes on this rank, all beginning together. One that is long is not repeated."""

    def measured(repeats: int) -> float:
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            operation()
        synchronize(device)
        return (time.perf_counter() - start) / repeats

    measured(1)  # connections are made at the first use
    once = measured(1)
    return once if slowest_rank([once]) > [_LONG_S] else measured(_REPEATS)


def _all_reduce(values: torch.Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(values)


def _all_to_all(values: torch.Tensor) -> Callable[[], object]:
    received = torch.empty_like(values)
    return lambda: dist.all_to_all_single(received, values)
