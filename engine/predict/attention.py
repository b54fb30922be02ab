"""Preview of the configured attention on every rank: work, traffic, buffers, predicted time. No torch.

The counted plans are the very plans that a run executes.
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
    """Buffers of one rank with the same kind, heads, memory and use.

    is_argument   whether these are inputs or outputs of the plan
    head_parts    number of parts into which heads are split, of which a buffer has one; 1: all heads
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
    """One pass of one layer on one rank; `pairs`: visible (query, key) pairs times this rank's share of the heads."""

    rank: int
    steps: int
    tiles: int
    pairs: float
    sent: LinkBytes
    buffers: tuple[Buffers, ...]

    def buffer_bytes(self, where: Store, *, is_argument: bool | None = None) -> int:
        """Return the bytes of buffers in one memory: all, only arguments (True), or only the others (False)."""
        return sum(b.size_bytes for b in self.buffers if b.where == where and is_argument in (None, b.is_argument))


@dataclass(frozen=True)
class PassPreview:
    """One pass of one layer.

    ranks             planned ranks: all, or those of `planned_ranks` in a large group
    ring_rank_pairs   visible pairs of every ring rank's queries, planned or not, with all its heads counted once
    timeline          simulation of the planned ranks
    """

    direction: PassName
    ranks: tuple[RankPreview, ...]
    ring_rank_pairs: tuple[int, ...]
    timeline: Timeline

    @property
    def steps(self) -> int:
        """The largest number of steps of any rank."""
        return max(rank.steps for rank in self.ranks)

    @property
    def tiles(self) -> int:
        """The largest number of tiles of any rank."""
        return max(rank.tiles for rank in self.ranks)

    @property
    def visible_pairs(self) -> int:
        """Visible (query, key) pairs of one sequence, over all ranks."""
        return sum(self.ring_rank_pairs)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank divided by the mean over ranks: 1 is perfect, 2 leaves half of the devices idle."""
        total = sum(self.ring_rank_pairs)
        return max(self.ring_rank_pairs) * len(self.ring_rank_pairs) / total if total else 1.0

    @property
    def busiest_links(self) -> LinkBytes:
        """The most bytes that any planned rank sends, per kind of link."""
        return LinkBytes(*map(max, zip(*(rank.sent for rank in self.ranks), strict=True)))

    @property
    def largest_buffers(self) -> RankPreview:
        """The preview of the rank whose buffers take the most device memory."""
        return max(self.ranks, key=lambda rank: rank.buffer_bytes("device"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `buffers` are those of `largest_buffers`."""
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
    """The passes of layer `first` in a training step, in order; `count` layers have the same mask, method and policy.

    A pass "recompute" is the forward pass that runs again in backward, for queries whose results were not saved.
    """

    attention: LayerAttention
    first: int
    count: int
    passes: tuple[PassPreview, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `queries_before`: attention of queries before this position is recomputed."""
        return {
            "layer": self.first,
            "count": self.count,
            "queries_before": self.attention.recompute_before,
            "passes": {one.direction: one.to_dict() for one in self.passes},
        }


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of attention in all layers: computation of the busiest rank, and communication that is not hidden."""

    forward_s: float
    again_s: float
    backward_s: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        """Computation and exposed communication together."""
        return self.forward_s + self.again_s + self.backward_s + self.exposed_s


@dataclass(frozen=True)
class AttentionPreview:
    """Attention in all layers of a model, on the ranks that share a sequence.

    layers   one entry per distinct layer that has attention, in their order in the model
    """

    method: AttentionMethod
    topology: Topology
    machine: Machine
    layers: tuple[LayerPreview, ...]

    @property
    def passes(self) -> tuple[PassPreview, ...]:
        """The passes of the first layer with attention."""
        return self.layers[0].passes

    @property
    def planned_ranks(self) -> tuple[int, ...]:
        """Planned ranks; bytes, buffers, steps, tiles and seconds are maxima over these."""
        return tuple(rank.rank for rank in self.passes[0].ranks)

    @property
    def time(self) -> AttentionTime:
        """Predicted time of all layers, each pass once."""
        computing: dict[PassName, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
        exposed_s = 0.0
        for layer in self.layers:
            for one in layer.passes:
                computing[one.direction] += layer.count * one.timeline.busiest_s
                exposed_s += layer.count * one.timeline.exposed_s
        return AttentionTime(computing["forward"], computing["recompute"], computing["backward"], exposed_s)

    @property
    def warnings(self) -> list[str]:
        """Legal settings that are probably a mistake, one sentence each."""
        return warnings_of(self.method, self.topology)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the method and every distinct layer."""
        return {**asdict(self.method), "layers": [layer.to_dict() for layer in self.layers]}

    def time_to_dict(self) -> dict[str, Any]:
        """Return predicted seconds of the first layer with attention per pass, and of all layers."""
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
    """Return the preview of `method` for `config` on the ranks of `topology`, which share one sequence.

    Plans `ranks`; None: all ranks, or those of `planned_ranks` in a large group, one or two seconds for 256 ranks.
    Packed documents are unknown before data are read, so one sequence is planned. Raises ConfigError for an impossible
    mask.
    """
    layer_pattern = attention_layers(config, method)
    blocks = divide_run(config, method, layer_pattern)
    in_order = [layer_pattern[index % len(layer_pattern)] for index in range(config.model.num_layers)]
    counts = Counter(layer for layer in in_order if layer.attends)
    ranks = planned_ranks(topology, blocks, next(iter(counts)).mask) if ranks is None else ranks
    group = _Group(token_bytes_of(config, method), topology, machine, ranks)
    layers = [
        LayerPreview(attention, layer_pattern.index(attention), count, tuple(_preview_layer(attention, blocks, group)))
        for attention, count in counts.items()
    ]
    return AttentionPreview(method, topology, machine, tuple(layers))


def planned_ranks(topology: Topology, blocks: Blocks, mask: Mask) -> tuple[int, ...]:
    """Return all ranks; above MOST_RANKS_PLANNED the end ranks of the first two, the last and the busiest node.

    Ranks of a ring differ at its ends, and by the visible pairs of their queries: tests confirm that these ranks have
    the largest figures of all.
    """
    if topology.size <= MOST_RANKS_PLANNED:
        return tuple(range(topology.size))
    pairs = ring_rank_pairs(mask, blocks.ring)
    busiest = topology.node_of(blocks.grid.rank(pairs.index(max(pairs)), 0))
    nodes = sorted({0, min(1, topology.nodes - 1), topology.nodes - 1, busiest})
    last = topology.local_ranks - 1
    ends = sorted({0, min(blocks.grid.heads, last), last})  # in a node: the first two ring members and the last one
    return tuple(node * topology.local_ranks + rank for node in nodes for rank in ends)


class _Group(NamedTuple):
    """The values with which a plan is counted."""

    token_bytes: TokenBytes
    topology: Topology
    machine: Machine
    ranks: tuple[int, ...]


def _preview_layer(attention: LayerAttention, blocks: Blocks, group: _Group) -> Iterator[PassPreview]:
    """Yield every pass of a layer."""
    cut = attention.recompute_before
    plans = plan_method(attention.method, attention.mask, blocks, group.ranks, recompute_before=cut)
    pairs = ring_rank_pairs(attention.mask, blocks.ring)
    yield (forward := _preview_pass(plans.forward, "forward", group, pairs))
    again = plans.recompute
    if again is plans.forward:  # everything is recomputed: counted and simulated already
        yield replace(forward, direction="recompute")
    elif again is not None:
        fewer = ring_rank_pairs(attention.mask.queries_before(cut or 0), blocks.ring)
        yield _preview_pass(again, "recompute", group, fewer)
    yield _preview_pass(plans.backward, "backward", group, pairs)


def _preview_pass(plan: AttentionPlan, name: PassName, group: _Group, pairs: tuple[int, ...]) -> PassPreview:
    token_bytes, topology, machine, _ = group
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
    """Return the buffers grouped by kind, share of heads, memory and use, in order of appearance."""
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
