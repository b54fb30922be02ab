"""What the configured attention will do on every rank: work, traffic, buffers, predicted time. No torch.

The plans that are counted here are those that would be run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from engine.config.settings import RunConfig, Store
from engine.planning.methods.blocks import Blocks, divide_run
from engine.planning.methods.layers import LayerAttention, attention_layers
from engine.planning.methods.presets import AttentionMethod, warnings_of
from engine.planning.program.ops import AttentionPlan, Buffer, Kind, LinkBytes, RankPlan, TokenBytes
from engine.planning.schedules.plan import PassName, plan_method, token_bytes_of
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.visible import ring_rank_pairs
from engine.predict.machine import Machine
from engine.predict.plan_costs import query_heads
from engine.predict.replay import Timeline, replay

MOST_RANKS_PLANNED = 32


class Buffers(NamedTuple):
    """Buffers of one rank for the same thing; `is_argument`: inputs and outputs of the plan.

    `head_parts`: each holds one of so many parts of the heads; 1: all heads.
    """

    kind: str
    head_parts: int
    where: Store
    is_argument: bool
    buffers: int
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class RankPreview:
    """One pass of one layer on one rank; `pairs` are visible (query, key) pairs times the share of heads done here."""

    rank: int
    steps: int
    tiles: int
    pairs: float
    sent: LinkBytes
    buffers: tuple[Buffers, ...]

    def buffer_bytes(self, where: Store, *, is_argument: bool | None = None) -> int:
        """Bytes of the buffers in one memory; all of them, or only inputs and outputs, or only the others."""
        return sum(b.size_bytes for b in self.buffers if b.where == where and is_argument in (None, b.is_argument))


@dataclass(frozen=True)
class PassPreview:
    """One pass of one layer.

    ranks             those that are planned: all, or of a large group those of `planned_ranks`
    ring_rank_pairs   visible pairs of every ring rank's queries, planned or not, all its heads counted once
    timeline          of the planned ranks
    """

    direction: PassName
    ranks: tuple[RankPreview, ...]
    ring_rank_pairs: tuple[int, ...]
    timeline: Timeline

    @property
    def steps(self) -> int:
        """Steps of the rank with most of them."""
        return max(rank.steps for rank in self.ranks)

    @property
    def tiles(self) -> int:
        """Tiles of the rank with most of them."""
        return max(rank.tiles for rank in self.ranks)

    @property
    def visible_pairs(self) -> int:
        """Pairs of one sequence that the mask lets through, over all ranks."""
        return sum(self.ring_rank_pairs)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean of all ranks: 1 is perfect, 2 wastes half of the devices."""
        total = sum(self.ring_rank_pairs)
        return max(self.ring_rank_pairs) * len(self.ring_rank_pairs) / total if total else 1.0

    @property
    def busiest_links(self) -> LinkBytes:
        """Largest bytes of any planned rank, for each kind of link."""
        return LinkBytes(*map(max, zip(*(rank.sent for rank in self.ranks), strict=True)))

    @property
    def largest_buffers(self) -> RankPreview:
        """The rank whose buffers take most device memory."""
        return max(self.ranks, key=lambda rank: rank.buffer_bytes("device"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `buffers` are those of the rank that needs most device memory."""
        largest = self.largest_buffers
        memory = {
            where: {
                "bytes": largest.buffer_bytes(where),
                "argument_bytes": largest.buffer_bytes(where, is_argument=True),
            }
            for where in ("device", "host")
        }
        return {
            "steps": self.steps,
            "tiles": self.tiles,
            "visible_pairs": self.visible_pairs,
            "balance": self.balance,
            "bytes_per_layer": self.busiest_links._asdict(),
            "buffers": {**memory, "rank": largest.rank, "kinds": [b._asdict() for b in largest.buffers]},
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
        }


@dataclass(frozen=True)
class LayerPreview:
    """All that a step runs of layer `first` and of the others, `count` with it, that have the same mask, method and
    policy, in its order.

    A pass "recompute" is the forward pass as it runs again in backward, for queries whose results were not kept.
    """

    attention: LayerAttention
    first: int
    count: int
    passes: tuple[PassPreview, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `queries_before`: the position before which queries are attended again."""
        return {
            "layer": self.first,
            "count": self.count,
            "queries_before": self.attention.recompute_before,
            "passes": {one.direction: one.to_dict() for one in self.passes},
        }


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of attention in all layers of one pass over a sequence: of the rank that computes most, and what messages
    add to it that nothing hides.
    """

    forward_s: float
    again_s: float
    backward_s: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward_s + self.again_s + self.backward_s + self.exposed_s


@dataclass(frozen=True)
class AttentionPreview:
    """What attention does in all layers of a model, for a group of ranks that share a sequence.

    `layers`: one entry per distinct layer, that of layer 0 first.
    """

    method: AttentionMethod
    topology: Topology
    machine: Machine
    layers: tuple[LayerPreview, ...]

    @property
    def passes(self) -> tuple[PassPreview, ...]:
        """Those of layer 0."""
        return self.layers[0].passes

    @property
    def planned_ranks(self) -> tuple[int, ...]:
        """Ranks whose plans were made: bytes, buffers, steps, tiles and seconds are the largest of theirs."""
        return tuple(rank.rank for rank in self.passes[0].ranks)

    @property
    def time(self) -> AttentionTime:
        """Predicted for all layers, each pass once."""
        computing: dict[PassName, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
        exposed_s = 0.0
        for layer in self.layers:
            for one in layer.passes:
                computing[one.direction] += layer.count * one.timeline.busiest_s
                exposed_s += layer.count * one.timeline.exposed_s
        return AttentionTime(computing["forward"], computing["recompute"], computing["backward"], exposed_s)

    @property
    def warnings(self) -> list[str]:
        """What is legal and probably not meant."""
        return warnings_of(self.method, self.topology)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the method, and what every distinct layer does."""
        return {**asdict(self.method), "layers": [layer.to_dict() for layer in self.layers]}

    def time_to_dict(self) -> dict[str, Any]:
        """Predicted seconds of layer 0 by pass and of all layers."""
        return {
            "machine": self.machine.name,
            "per_layer": {one.direction: _time_to_dict(one.timeline) for one in self.passes},
            "layers": sum(layer.count for layer in self.layers),
            "seconds": self.time.seconds,
            "exposed_s": self.time.exposed_s,
        }


def preview_attention(
    config: RunConfig,
    method: AttentionMethod,
    topology: Topology,
    machine: Machine,
    ranks: tuple[int, ...] | None = None,
) -> AttentionPreview:
    """What `method` does for a run of `config` on the ranks of `topology`, which share one sequence.

    Plans `ranks`; None: all, of large groups those of `planned_ranks`, which takes a second or two for 256. Packed
    documents, which only the data know, are planned as one sequence. Raises ConfigError for a mask that cannot be.
    """
    layer_pattern = attention_layers(config, method)
    blocks = divide_run(config, method, layer_pattern)
    counts = Counter(layer_pattern[index % len(layer_pattern)] for index in range(config.model.num_layers))
    ranks = planned_ranks(topology, blocks, layer_pattern[0].mask) if ranks is None else ranks
    place = _Place(token_bytes_of(config, method), topology, machine, ranks)
    layers = [
        LayerPreview(attention, layer_pattern.index(attention), count, tuple(_preview_layer(attention, blocks, place)))
        for attention, count in counts.items()
    ]
    return AttentionPreview(method, topology, machine, tuple(layers))


def planned_ranks(topology: Topology, blocks: Blocks, mask: Mask) -> tuple[int, ...]:
    """All ranks; of more than MOST_RANKS_PLANNED the ends of the first two nodes, of the last and of the busiest one.

    Rings differ at their ends only, and by what a rank's queries see: the tests find the largest figures of all ranks
    among these.
    """
    if topology.size <= MOST_RANKS_PLANNED:
        return tuple(range(topology.size))
    pairs = ring_rank_pairs(mask, blocks.ring)
    busiest = topology.node_of(blocks.grid.rank(pairs.index(max(pairs)), 0))
    nodes = sorted({0, min(1, topology.nodes - 1), topology.nodes - 1, busiest})
    last = topology.local_ranks - 1
    ends = sorted({0, min(blocks.grid.heads, last), last})  # of a node: the first two ring members, the last one
    return tuple(node * topology.local_ranks + rank for node in nodes for rank in ends)


class _Place(NamedTuple):
    """What a plan is counted with."""

    token_bytes: TokenBytes
    topology: Topology
    machine: Machine
    ranks: tuple[int, ...]


def _preview_layer(attention: LayerAttention, blocks: Blocks, place: _Place) -> Iterator[PassPreview]:
    """Every pass of a layer."""
    cut = attention.recompute_before
    plans = plan_method(attention.method, attention.mask, blocks, place.ranks, recompute_before=cut)
    pairs = ring_rank_pairs(attention.mask, blocks.ring)
    yield (forward := _preview_pass(plans.forward, "forward", place, pairs))
    again = plans.recompute
    if again is plans.forward:  # all of it: counted and replayed already
        yield replace(forward, direction="recompute")
    elif again is not None:
        fewer = ring_rank_pairs(attention.mask.queries_before(cut or 0), blocks.ring)
        yield _preview_pass(again, "recompute", place, fewer)
    yield _preview_pass(plans.backward, "backward", place, pairs)


def _preview_pass(plan: AttentionPlan, name: PassName, place: _Place, pairs: tuple[int, ...]) -> PassPreview:
    token_bytes, topology, machine, _ = place
    sent = plan.bytes_by_link(token_bytes, topology)
    ranks = tuple(_preview_rank(rank_plan, token_bytes, sent[rank]) for rank, rank_plan in sorted(plan.ranks.items()))
    return PassPreview(name, ranks, pairs, replay(plan, machine, token_bytes, topology))


def _preview_rank(plan: RankPlan, token_bytes: TokenBytes, sent: LinkBytes) -> RankPreview:
    tiles = list(plan.tiles())
    pairs = sum(tile.band.area() * query_heads(tile, plan.buffers, token_bytes) for tile in tiles)
    return RankPreview(
        rank=plan.rank,
        steps=len(plan.steps),
        tiles=len(tiles),
        pairs=pairs / token_bytes.num_heads,
        sent=sent,
        buffers=_buffers(plan, token_bytes),
    )


def _buffers(plan: RankPlan, token_bytes: TokenBytes) -> tuple[Buffers, ...]:
    """Slots of one kind, share of heads, memory and use together, in order of appearance."""
    groups: defaultdict[tuple[Kind, int, Store, bool], list[Buffer]] = defaultdict(list)
    for buffer in plan.buffers:
        groups[buffer.kind, buffer.heads.count, buffer.where, buffer.argument is not None].append(buffer)
    return tuple(
        Buffers(
            kind=kind.value,
            head_parts=head_parts,
            where=where,
            is_argument=is_argument,
            buffers=len(buffers),
            rows=sum(buffer.rows for buffer in buffers),
            size_bytes=sum(buffer.rows * token_bytes.of(buffer.kind, buffer.heads) for buffer in buffers),
        )
        for (kind, head_parts, where, is_argument), buffers in groups.items()
    )


def _rank_to_dict(rank: RankPreview) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "steps": rank.steps,
        "tiles": rank.tiles,
        "pairs": rank.pairs,
        "bytes_per_layer": rank.sent._asdict(),
        "device_buffer_bytes": rank.buffer_bytes("device"),
        "host_buffer_bytes": rank.buffer_bytes("host"),
    }


def _time_to_dict(timeline: Timeline) -> dict[str, float]:
    return {
        "seconds": timeline.total_s,
        "compute_s": timeline.busiest_s,
        "exposed_s": timeline.exposed_s,
        "longest_wait_s": max(timeline.waited_s.values()),
    }
