"""Measures all-reduce and all-to-all over all ranks by size, then messages between every pair of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from engine.bench.measure import Stopwatch, exchange
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.distributed.mesh import check_world, choose_device, read_placement, start_process_group
from engine.runs.folder import RunFolder
from engine.training.rank.lifecycle import run_states
from engine.training.rank.process import RankStatus

SIZES = tuple(1 << bits for bits in range(16, 29, 2))
PAIR_BYTES = 1 << 22
_WINDOW_S = 0.01


def measure_collectives(config: RunConfig, run: RunFolder, status: RankStatus) -> None:
    """Run one rank; rank 0 writes the results to summary.json."""
    placement = read_placement()
    with run_states(run, status, rank=placement.rank):
        status.phase = "start"
        check_world(config.cluster, placement)  # fewer ranks than requested would measure another setup
        if placement.world_size < 2:
            raise ConfigError("collectives need two ranks: name two nodes or more, or set cluster.ranks_per_node=2")
        device = choose_device(config.cluster, placement)
        started = start_process_group(device, placement)
        status.phase = "collectives"
        found = {"collectives": sweep(device), "pairs": exchange_pairs(device, placement.local_world_size)}
        if placement.rank == 0:
            run.write_summary(found)
        if started:
            dist.destroy_process_group()


def sweep(device: torch.device, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Return per operation and size the seconds of the slowest rank, and busbw as in nccl-tests. Collective."""
    ranks = dist.get_world_size()
    watch, sizes = Stopwatch(device, _WINDOW_S), [size // (4 * ranks) * (4 * ranks) for size in sizes]
    rows = []
    # Share of the sent bytes that crosses links, so that busbw is comparable with the rate of a link.
    for name, share, prepare in (
        ("all_reduce", 2 * (ranks - 1) / ranks, lambda values: partial(dist.all_reduce, values)),
        ("all_to_all", (ranks - 1) / ranks, lambda x: partial(dist.all_to_all_single, torch.empty_like(x), x)),
    ):
        found = watch.by_size(sizes, lambda size, prepare=prepare: prepare(torch.zeros(size // 4, device=device)))  # type: ignore[misc]
        rows += [
            {"operation": name, "bytes": size, "seconds": seconds, "busbw_gbps": 8e-9 * size / seconds * share}
            for size, (_, seconds) in zip(sizes, found, strict=False)
        ]
    return rows


def exchange_pairs(device: torch.device, per_node: int) -> list[dict[str, Any]]:
    """Return the bandwidth of the slowest ranks per pair of nodes, both directions; disjoint pairs run concurrently.

    Every rank exchanges messages with the same local rank of the other node. Collective.
    """
    watch, rows = Stopwatch(device, _WINDOW_S), []
    own, seat = divmod(dist.get_rank(), per_node)
    for pairs in plan_rounds(dist.get_world_size() // per_node):
        other = next((sum(pair) - own for pair in pairs if own in pair), None)
        partner = None if other is None else other * per_node + seat
        sent = torch.zeros(PAIR_BYTES // 4, device=device)
        by_rank = watch.by_rank((lambda: None) if partner is None else exchange(sent, partner, partner))
        for one, two in pairs:
            slowest = max(by_rank[node * per_node + local] for node in (one, two) for local in range(per_node))
            rows.append({"nodes": [one, two], "gbps": 8e-9 * PAIR_BYTES / slowest})
    return rows


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return every pair of `count` nodes exactly once, in rounds in which every node is part of one pair at most.

    As in a round-robin tournament: the first node is fixed, the others rotate by one position.

        round 0: 0-3 1-2    round 1: 0-2 1-3    round 2: 0-1 2-3
    """
    places = list(range(count + count % 2))
    rounds = []
    for _ in places[1:]:
        facing = zip(places[: len(places) // 2], reversed(places), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in facing if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
