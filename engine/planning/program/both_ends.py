"""Hashes by which ranks compare the two ends of their messages, for each plans its own end by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.config.schema import hash_json
from engine.planning.program.ops import HOST_CHANNELS, RankPlan

Digests = Mapping[int, str]  # by peer


def message_digests(plan: RankPlan) -> Digests:
    """A digest per peer of all messages with it; equal on both ranks where their plans fit together."""
    messages: defaultdict[int, list[tuple[object, ...]]] = defaultdict(list)
    for transfer in plan.transfers():
        if transfer.channel in HOST_CHANNELS:
            continue
        view, buffer = transfer.view, plan.buffers[transfer.view.buffer]
        heads = buffer.heads.index, buffer.heads.count
        # Of one step a rank may post what it sends first, its peer what it receives: the tag orders them alike.
        messages[transfer.peer].append((transfer.tag, transfer.channel, buffer.kind, view.stop - view.start, *heads))
    return {peer: hash_json(sorted(found, key=str)) for peer, found in messages.items()}


def disagreeing_ranks(digests: Sequence[Digests]) -> list[tuple[int, int]]:
    """Pairs of ranks whose ends differ, by the digests of every rank of a group."""
    size = len(digests)
    return [(a, b) for a in range(size) for b in range(a + 1, size) if digests[a].get(b) != digests[b].get(a)]
