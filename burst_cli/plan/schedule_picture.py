"""A schedule as a picture: what every rank computes, what arrives meanwhile, where it waits. Imported only when drawn.

A row per rank. Boxes are tiles; the thin lanes under them are the channels, a bar per message from its start until it
has arrived. What lies under a box is hidden; a red gap in the row is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from burst_cli.figures import grouped, seconds
from burst_cli.plan.candidates import Plan
from burst_cli.plan.table import exposed_words
from engine.planning.methods.topology import Topology
from engine.planning.time.replay import COMPUTE_LANE, Interval, Timeline

MAX_RANKS = 32

# Okabe and Ito's palette, which also people who confuse red and green can tell apart. Channels of one traffic class
# share a hue; the lighter one stays inside the ring.
_TILES = {
    "full": ("#7fb2dc", "tile, full"),
    "causal": ("#2f6fa7", "tile, causal"),
    "band": ("#57a0a3", "tile, other band"),
    "op": ("#9a9a9a", "add, copy, init"),
    "copy": ("#c9b27c", "messages that cores copy"),
    "wait": ("#f4b8b0", "waiting (exposed)"),
}
_CHANNELS = {
    "x.in": ("#f0a830", "payload, inner ring"),
    "x.out": ("#c4581b", "payload, outer ring"),
    "g.in": ("#5dbb87", "gradients, inner ring"),
    "g.out": ("#00724f", "gradients, outer ring"),
    "h": ("#b569a0", "head exchange"),
    "h2d": ("#8c7bc8", "host to device"),
    "d2h": ("#4b3f8f", "device to host"),
}
_ARRIVALS = ("recv", "load", "store")
_TILE_HEIGHT, _LANE_HEIGHT, _LANE_GAP, _ROW_GAP = 1.0, 0.24, 0.06, 0.42
_INCHES_PER_UNIT = 0.26
_WIDTH_INCHES = 13.0


@dataclass(frozen=True)
class _Rows:
    """Which ranks and lanes are drawn, and where: y grows downwards, in tile heights."""

    ranks: tuple[int, ...]
    lanes: tuple[str, ...]

    @property
    def pitch(self) -> float:
        """From the top of one rank to the top of the next."""
        return _TILE_HEIGHT + len(self.lanes) * (_LANE_HEIGHT + _LANE_GAP) + _ROW_GAP

    @property
    def height(self) -> float:
        """Of all ranks."""
        return self.pitch * len(self.ranks) - _ROW_GAP

    def span(self, rank: int, lane: str) -> tuple[float, float]:
        """(top, height) of a lane."""
        top = self.ranks.index(rank) * self.pitch
        if lane == COMPUTE_LANE:
            return top, _TILE_HEIGHT
        offset = _TILE_HEIGHT + _LANE_GAP + self.lanes.index(lane) * (_LANE_HEIGHT + _LANE_GAP)
        return top + offset, _LANE_HEIGHT


def schedule_figure(candidate: Plan) -> Figure:
    """The schedule of the passes of one layer, side by side on one scale of time."""
    passes = candidate.preview.passes
    timelines = [one.timeline for one in passes]
    topology = candidate.preview.topology
    ranks = shown_ranks(topology, candidate.preview.planned_ranks)
    intervals = [[i for i in timeline.intervals if i.rank in ranks] for timeline in timelines]
    used = {i.lane for group in intervals for i in group if i.kind in _ARRIVALS}
    rows = _Rows(ranks, tuple(lane for lane in _CHANNELS if lane in used))
    figure = Figure(figsize=(_WIDTH_INCHES, rows.height * _INCHES_PER_UNIT + 2.25), layout="constrained")
    widths = [max(timeline.total_s, 0.2 * max(t.total_s for t in timelines)) for timeline in timelines]
    axes = figure.subplots(1, len(timelines), sharey=True, squeeze=False, width_ratios=widths)[0]
    for index, (axis, one, group) in enumerate(zip(axes, passes, intervals, strict=True)):
        _draw_pass(axis, one.timeline, group, rows)
        title = f"{one.direction}: {seconds(one.timeline.total_s)}\nexposed: {exposed_words(one)}"
        axis.set_title(title, fontsize=9.5, loc="left")
        _name_rows(axis, rows, topology, first=index == 0)
    kinds = {i.kind for group in intervals for i in group if i.lane == COMPUTE_LANE}
    styles = [*(style for kind, style in _TILES.items() if kind in kinds), *(_CHANNELS[lane] for lane in rows.lanes)]
    handles = [Patch(facecolor=color, label=label) for color, label in styles]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8.5, frameon=False)
    figure.suptitle(_title(candidate, ranks), fontsize=9.5, x=0.01, ha="left")
    return figure


def shown_ranks(topology: Topology, planned: Sequence[int]) -> tuple[int, ...]:
    """All ranks, or of a large group those of its first node, or of a large node the first MAX_RANKS; if planned."""
    few = topology.size <= MAX_RANKS or topology.local_ranks == 1
    return tuple(rank for rank in planned if few or rank < topology.local_ranks)[:MAX_RANKS]


def _draw_pass(axis: Axes, timeline: Timeline, intervals: Sequence[Interval], rows: _Rows) -> None:
    unit, scale = _time_unit(timeline.total_s)
    for rank in rows.ranks:
        for lane in rows.lanes:
            top, height = rows.span(rank, lane)
            axis.axhspan(top, top + height, color="#f3f3f3", linewidth=0, zorder=0)
    shown = [i for i in intervals if i.lane == COMPUTE_LANE or i.kind in _ARRIVALS]
    groups = grouped(((i.rank, i.lane, i.kind), (i.start_s * scale, i.seconds * scale)) for i in shown)
    for (rank, lane, kind), spans in groups.items():
        color = _TILES[kind][0] if lane == COMPUTE_LANE else _CHANNELS[lane][0]
        is_tile = lane == COMPUTE_LANE and kind not in ("op", "copy", "wait")
        # The edge keeps messages visible that are thousands of times shorter than a tile.
        edge = "white" if is_tile else color
        axis.broken_barh(spans, rows.span(rank, lane), facecolor=color, edgecolor=edge, linewidth=0.5, zorder=2)
    axis.set_xlim(0, timeline.total_s * scale)
    axis.set_ylim(rows.height + 0.15, -0.15)
    axis.set_xlabel(unit, fontsize=9)
    axis.tick_params(labelsize=8)


def _name_rows(axis: Axes, rows: _Rows, topology: Topology, *, first: bool) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    middles = [rows.span(rank, COMPUTE_LANE)[0] + _TILE_HEIGHT / 2 for rank in rows.ranks]
    axis.set_yticks(middles, [f"rank {rank}" for rank in rows.ranks], fontsize=8)
    axis.tick_params(axis="y", length=0, labelleft=first)
    for position, rank in enumerate(rows.ranks[1:], start=1):
        if not topology.same_node(rank, rank - 1):
            axis.axhline(position * rows.pitch - _ROW_GAP / 2, color="#555555", linewidth=0.8, linestyle=(0, (6, 3)))


def _title(candidate: Plan, ranks: Sequence[int]) -> str:
    preview, config = candidate.preview, candidate.config
    topology, method = preview.topology, preview.method
    total = sum(one.timeline.total_s for one in preview.passes)
    heading = f"{method.preset} on {topology.size} ranks ({topology.nodes} x {topology.local_ranks}), "
    heading += f"{preview.machine.name}: {seconds(total)} per layer"
    subtitle = (
        f"{config.exp}, {config.train.seq_len:,} tokens, layout {method.layout}, heads {method.head_parallel_size} x "
        f"rings {method.ring_inner_size} x {method.ring_outer_size}, {method.backward_circulates} circulates in "
        "backward; boxes are tiles, bars below them messages as they arrive"
    )
    if len(ranks) < topology.size:
        subtitle += f"; only ranks {', '.join(map(str, ranks))} are drawn"
    return f"{heading}\n{subtitle}"


def _time_unit(total_s: float) -> tuple[str, float]:
    if total_s >= 1:
        return "seconds", 1.0
    return ("milliseconds", 1e3) if total_s >= 1e-3 else ("microseconds", 1e6)
