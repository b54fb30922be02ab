"""A schedule as a picture: what every rank computes, what arrives meanwhile, where it waits. Imported only when drawn.

A row per rank. Boxes are tiles; the thin lanes under them are the channels, a bar per message from its start until it
has arrived. What lies under a box is hidden; a red gap in the row is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from burst_cli.plan.candidates import Plan
from burst_cli.plan.table import exposed_words
from burst_cli.render import grouped
from engine.planning.topology import Topology
from engine.predict.replay import COMPUTE_LANE, Interval, Timeline
from engine.runs.figures import seconds

Positions = Mapping[tuple[int, str], tuple[float, float]]  # (rank, lane): (top, height)
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


def schedule_figure(candidate: Plan) -> Figure:
    """The schedule of the passes of one layer, side by side on one scale of time."""
    passes, topology = candidate.preview.passes, candidate.preview.topology
    ranks = shown_ranks(topology, candidate.preview.planned_ranks)
    intervals = [[i for i in one.timeline.intervals if i.rank in ranks] for one in passes]
    used = {i.lane for group in intervals for i in group if i.kind in _ARRIVALS}
    places, height = _positions(ranks, [lane for lane in _CHANNELS if lane in used])
    figure = Figure(figsize=(_WIDTH_INCHES, height * _INCHES_PER_UNIT + 2.25), layout="constrained")
    longest = max(one.timeline.total_s for one in passes)
    widths = [max(one.timeline.total_s, 0.2 * longest) for one in passes]
    axes = figure.subplots(1, len(passes), sharey=True, squeeze=False, width_ratios=widths)[0]
    for index, (axis, one, group) in enumerate(zip(axes, passes, intervals, strict=True)):
        _draw_pass(axis, one.timeline, group, places)
        title = f"{one.direction}: {seconds(one.timeline.total_s)}\nexposed: {exposed_words(one)}"
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.set_ylim(height + 0.15, -0.15)
        _name_rows(axis, {rank: places[rank, COMPUTE_LANE][0] for rank in ranks}, topology, first=index == 0)
    kinds = {i.kind for group in intervals for i in group if i.lane == COMPUTE_LANE}
    styles = [style for kind, style in _TILES.items() if kind in kinds]
    styles += [style for lane, style in _CHANNELS.items() if lane in used]
    handles = [Patch(facecolor=color, label=label) for color, label in styles]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8.5, frameon=False)
    figure.suptitle(_title(candidate, ranks), fontsize=9.5, x=0.01, ha="left")
    return figure


def shown_ranks(topology: Topology, planned: Sequence[int]) -> tuple[int, ...]:
    """All ranks, or of a large group those of its first node, or of a large node the first MAX_RANKS; if planned."""
    few = topology.size <= MAX_RANKS or topology.local_ranks == 1
    return tuple(rank for rank in planned if few or rank < topology.local_ranks)[:MAX_RANKS]


def _positions(ranks: Sequence[int], lanes: Sequence[str]) -> tuple[Positions, float]:
    """(where every lane of every rank is drawn, the height of all); y grows downwards, in tile heights."""
    places: dict[tuple[int, str], tuple[float, float]] = {}
    top = 0.0
    for rank in ranks:
        places[rank, COMPUTE_LANE] = top, _TILE_HEIGHT
        top += _TILE_HEIGHT
        for lane in lanes:
            places[rank, lane] = top + _LANE_GAP, _LANE_HEIGHT
            top += _LANE_GAP + _LANE_HEIGHT
        top += _ROW_GAP
    return places, top - _ROW_GAP


def _draw_pass(axis: Axes, timeline: Timeline, intervals: Sequence[Interval], places: Positions) -> None:
    units = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6}
    unit = next((name for name, scale in units.items() if timeline.total_s * scale >= 1), "microseconds")
    scale = units[unit]
    for (_, lane), (top, height) in places.items():
        if lane != COMPUTE_LANE:
            axis.axhspan(top, top + height, color="#f3f3f3", linewidth=0, zorder=0)
    shown = [i for i in intervals if i.lane == COMPUTE_LANE or i.kind in _ARRIVALS]
    groups = grouped(((i.rank, i.lane, i.kind), (i.start_s * scale, i.seconds * scale)) for i in shown)
    for (rank, lane, kind), spans in groups.items():
        is_tile = lane == COMPUTE_LANE
        color = _TILES[kind][0] if is_tile else _CHANNELS[lane][0]
        # The edge keeps messages visible that are thousands of times shorter than a tile.
        edge = "white" if is_tile and kind not in ("op", "copy", "wait") else color
        axis.broken_barh(spans, places[rank, lane], facecolor=color, edgecolor=edge, linewidth=0.5, zorder=2)
    axis.set_xlim(0, timeline.total_s * scale)
    axis.set_xlabel(unit, fontsize=9)
    axis.tick_params(labelsize=8)


def _name_rows(axis: Axes, tops: Mapping[int, float], topology: Topology, *, first: bool) -> None:
    """The name of every rank, by the top of its row, and a line between nodes."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_yticks([top + _TILE_HEIGHT / 2 for top in tops.values()], [f"rank {rank}" for rank in tops], fontsize=8)
    axis.tick_params(axis="y", length=0, labelleft=first)
    for rank, top in list(tops.items())[1:]:
        if not topology.same_node(rank, rank - 1):
            axis.axhline(top - _ROW_GAP / 2, color="#555555", linewidth=0.8, linestyle=(0, (6, 3)))


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
