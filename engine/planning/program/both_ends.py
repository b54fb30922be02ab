"""Hashes with which ranks compare the two ends of their messages, since each rank plans only its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.config.schema import hash_json
from engine.planning.program.ops import HOST_CHANNELS, RankPlan

Digests = Mapping[int, str]  # by peer


def message_digests(plan: RankPlan) -> Digests:
    """Return a digest of all messages per peer; equal on both ranks if their plans match."""
    messages: defaultdict[int, list[tuple[object, ...]]] = defaultdict(list)
    for transfer in plan.transfers():
        if transfer.channel in HOST_CHANNELS:
            continue
        view, buffer = transfer.view, plan.buffers[transfer.view.buffer]
        heads = buffer.heads.index, buffer.heads.count
        # Within a step a rank may post its sends first, its peer its receives: sort by tag.
        messages[transfer.peer].append((transfer.tag, transfer.channel, buffer.kind, view.stop - view.start, *heads))
    return {peer: hash_json(sorted(found, key=str)) for peer, found in messages.items()}


def disagreeing_ranks(digests: Sequence[Digests]) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose ends differ, given the digests of every rank of a group."""
    size = len(digests)
    return [(a, b) for a in range(size) for b in range(a + 1, size) if digests[a].get(b) != digests[b].get(a)]
