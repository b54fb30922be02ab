"""Plans as tables. Pure: candidates in, rich renderables out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, count, percent, seconds
from burst_cli.plan.candidates import Candidate
from burst_cli.plan.memory import memory_view
from engine.planning.methods.preview import AttentionPreview, Buffers, LayerPreview, PassPreview, links_to_dict
from engine.planning.time.machine import Machine
from engine.planning.time.step_time import StepTime

_CELL_PADDING = 3  # one blank on each side and the rule
_LINK_NAMES = {"intra": "inside the node", "inter": "between nodes", "host": "to and from host memory"}


@dataclass(frozen=True)
class Figure:
    """One figure of a pass and how it reads."""

    heading: str
    cell: Callable[[PassPreview], str]


def plan_view(candidate: Candidate, picture: Path | None = None) -> RenderableType:
    """One plan: the method, both passes, the buffers, the FLOPs."""
    preview = candidate.legal_preview
    parts: list[RenderableType] = [*_headings(candidate), Text()]
    for layer in preview.layers:
        if len(preview.layers) > 1:
            others = f" and {layer.count - 1} like it" if layer.count > 1 else ""
            parts.append(Text(f"layer {layer.first}{others}", style="bold"))
        parts += [_passes_table(layer, preview.machine), Text()]
    parts += [_buffers_table(preview), Text()]
    if candidate.ranking:
        parts += [_ranking_table(candidate), Text()]
    if candidate.memory is not None:
        parts += [*memory_view(candidate.memory), Text()]
    parts += _footer(candidate)
    if picture is not None:
        parts.append(Text.assemble(("picture     ", "bold"), str(picture)))
    return Group(*parts)


def comparison_table(candidates: Sequence[Candidate], width: int) -> RenderableType:
    """Legal candidates side by side, a row each if that fits into `width` columns, else a column; then the others."""
    legal = [candidate for candidate in candidates if candidate.preview]
    illegal = [candidate for candidate in candidates if not candidate.preview]
    columns = _comparison_columns(legal)
    cells = [[cell(candidate) for _, cell in columns] for candidate in legal]
    headings = [heading for heading, _ in columns]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    fits = sum(widths) + _CELL_PADDING * len(widths) < width
    best = _fastest(legal)
    parts: list[RenderableType] = [_placement(legal[0]), Text()]
    parts.append(_as_rows(headings, cells, best) if fits else _as_columns(headings, cells))
    for candidate in illegal:
        parts.append(Text.assemble((f"{candidate.name}: ", "bold"), ("not legal here", "yellow")))
        parts += [Text(f"  • {problem}") for problem in candidate.problems]
    parts.append(Text("Two figures in a cell: forward / backward. Bytes and seconds are per layer.", style="dim"))
    parts.append(_bytes_note())
    return Group(*parts)


def _headings(candidate: Candidate) -> list[Text]:
    method = candidate.legal_preview.method
    heading = f"layout {method.layout}, {_degrees(candidate)} (heads x inner ring x outer ring)"
    return [
        Text.assemble((f"{candidate.legal_config.exp}  ", "bold"), f"attention={candidate.name}"),
        _placement(candidate),
        Text.assemble(("method      ", "bold"), heading),
        Text.assemble(("backward    ", "bold"), f"{method.backward_circulates} circulates; {method.reason}"),
    ]


def _placement(candidate: Candidate) -> Text:
    topology, train = candidate.group, candidate.legal_config.train
    where = f"{topology.size} ranks on {topology.nodes} {'node' if topology.nodes == 1 else 'nodes'}"
    groups = candidate.world_size // topology.size
    times = f", {groups} such groups" if groups > 1 else ""
    return Text.assemble(("sequence    ", "bold"), f"{train.seq_len:,} tokens on {where}{times}; {train.compute_dtype}")


def _passes_table(layer: LayerPreview, machine: Machine | None) -> Table:
    table = _table("per layer and rank", *(one.direction for one in layer.every_pass), numbers=True)
    figures = [
        Figure("steps", lambda one: str(one.steps)),
        Figure("tiles", lambda one: str(one.tiles)),
        Figure("visible pairs, all ranks", lambda one: count(one.visible_pairs)),
        Figure("balance (busiest rank / mean)", lambda one: f"{one.balance:.3f}"),
        *(_link_figure(link) for link in _LINK_NAMES),
        Figure("buffers on the device", lambda one: _extra_buffers(one, "device")),
        Figure("buffers in host memory", lambda one: _extra_buffers(one, "host")),
    ]
    if machine is not None:
        figures += [
            Figure(f"predicted seconds ({machine.name})", lambda one: seconds(_seconds(one))),
            Figure("  computing (busiest rank)", lambda one: seconds(one.timeline.busiest_s if one.timeline else None)),
            Figure("  exposed communication", _exposed),
        ]
    for figure in figures:
        table.add_row(figure.heading, *(figure.cell(one) for one in layer.every_pass))
    return table


def _link_figure(link: str) -> Figure:
    def cell(one: PassPreview) -> str:
        busiest = links_to_dict(one.busiest_links)[link]
        return binary_bytes(busiest) if busiest else "0"

    return Figure(f"sent {_LINK_NAMES[link]}" if link != "host" else "moved to and from host memory", cell)


def _extra_buffers(one: PassPreview, where: str) -> str:
    place = "host" if where == "host" else "device"
    return binary_bytes(max(rank.buffer_bytes(place, pinned=False) for rank in one.ranks))  # type: ignore[arg-type]


def _seconds(one: PassPreview) -> float | None:
    return one.timeline.total_s if one.timeline else None


def _exposed(one: PassPreview) -> str:
    if one.timeline is None or one.timeline.total_s == 0:
        return seconds(None)
    exposed = one.timeline.exposed_s
    return f"{seconds(exposed)} ({percent(exposed / one.timeline.total_s)})" if exposed > 0 else "0"


def _buffers_table(preview: AttentionPreview) -> Table:
    table = _table("buffers", "what", "memory", "slots", "rows", "size")
    for column in table.columns[3:]:
        column.justify = "right"
    for one in preview.every_pass:
        for index, buffers in enumerate(one.largest_buffers.buffers):
            last = index == len(one.largest_buffers.buffers) - 1
            table.add_row(one.direction if index == 0 else "", *_buffer_cells(buffers), end_section=last)
    return table


def _buffer_cells(buffers: Buffers) -> tuple[str, ...]:
    heads = f" (1/{buffers.head_parts} of the heads)" if buffers.head_parts > 1 else ""
    what = f"{buffers.kind}{heads}, {'input or output' if buffers.pinned else 'working'}"
    return what, buffers.where, str(buffers.slots), f"{buffers.rows:,}", binary_bytes(buffers.size_bytes)


def _ranking_table(candidate: Candidate) -> Table:
    """What attention=auto chose from, best first."""
    headings = ("heads x inner x outer", "backward", "attention per step", "exposed", "buffers")
    table = _table("methods, best first", *headings)
    for column in table.columns[3:]:
        column.justify = "right"
    for index, one in enumerate(candidate.ranking):
        method = one.method
        degrees = f"{method.head_parallel_size} x {method.ring_inner_size} x {method.ring_outer_size}"
        moved = method.backward_circulates if method.ring_inner_size * method.ring_outer_size > 1 else "-"
        figures = (seconds(one.seconds), seconds(one.exposed_s), binary_bytes(one.buffer_bytes))
        table.add_row(method.preset, degrees, moved, *figures, style="bold" if index == 0 else None)
    return table


def _footer(candidate: Candidate) -> list[Text]:
    preview, flops = candidate.legal_preview, candidate.flops()
    lines = [Text.assemble(("warning: ", "yellow"), text) for text in preview.warnings]
    if candidate.legal_config.attention.documents:
        text = "packed documents depend on the data: planned as one sequence, the most work that a batch can be"
        lines.append(Text.assemble(("note: ", "yellow"), text))
    if len(preview.planned_ranks) < candidate.group.size:
        text = (
            f"pairs and balance are of all {candidate.group.size} ranks; steps, tiles, bytes, buffers and seconds are "
            f"the largest of ranks {', '.join(map(str, preview.planned_ranks))}, whose plans were made"
        )
        lines.append(Text.assemble(("note: ", "yellow"), text))
    time = preview.time_to_dict()
    if time is not None:
        lines.append(
            Text.assemble(
                (f"{time['layers']} layers   ", "bold"),
                f"{seconds(time['seconds'])} of attention, forward and backward, on {time['machine']}, "
                f"{seconds(time['exposed_s'])} of it exposed",
            )
        )
    if candidate.step is not None:
        lines.append(_step_line(candidate.step))
    step = f"model {count(flops.model)}, hardware {count(flops.hardware)}, as if nothing were masked "
    lines.append(Text.assemble(("FLOPs/step  ", "bold"), step + count(flops.model_full_attention)))
    lines.append(Text("Buffers of the rank that needs most; the working ones are what the method adds.", style="dim"))
    lines.append(_bytes_note())
    return lines


def _step_line(step: StepTime) -> Text:
    """The whole step, its parts that take time, and what follows for throughput."""
    shown = [(name, value) for name, value in asdict(step.parts).items() if value >= 0.001 * step.seconds]
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in shown)
    reached = f"{count(step.tokens_per_s_per_device)} tokens/s per device"
    reached += f", MFU {percent(step.mfu(step.flops.model))}"
    return Text.assemble(("step        ", "bold"), f"{seconds(step.seconds)}: {parts}; {reached}")


def _bytes_note() -> Text:
    return Text(
        "Bytes are those of the busiest rank, from the plan that would run. Seconds come from a model of the machine.",
        style="dim",
    )


def _comparison_columns(legal: Sequence[Candidate]) -> list[tuple[str, Callable[[Candidate], str]]]:
    def both(cell: Callable[[PassPreview], str]) -> Callable[[Candidate], str]:
        return lambda candidate: " / ".join(cell(one) for one in candidate.legal_preview.passes)

    def link(name: str) -> Callable[[PassPreview], str]:
        return lambda one: binary_bytes(links_to_dict(one.busiest_links)[name])

    columns: list[tuple[str, Callable[[Candidate], str]]] = [
        ("attention", lambda candidate: candidate.name),
        ("layout", lambda candidate: candidate.legal_preview.method.layout),
        ("heads x rings", _degrees),
        ("backward", lambda candidate: candidate.legal_preview.method.backward_circulates),
        ("steps", both(lambda one: str(one.steps))),
        ("tiles", both(lambda one: str(one.tiles))),
        ("balance", lambda candidate: f"{max(one.balance for one in candidate.legal_preview.passes):.2f}"),
        *((f"{name} node" if name != "host" else name, both(link(name))) for name in _used_links(legal)),
        ("device buffers", both(lambda one: _extra_buffers(one, "device"))),
    ]
    if all(candidate.memory for candidate in legal):
        columns.append(("memory of a rank", _memory_cell))
    if all(candidate.legal_preview.machine for candidate in legal):
        columns += [
            ("seconds", both(lambda one: seconds(_seconds(one)))),
            ("exposed", both(_exposed)),
        ]
    return columns


def _memory_cell(candidate: Candidate) -> str:
    assert candidate.memory is not None
    needed = binary_bytes(candidate.memory.prediction.needed_bytes)
    return needed if candidate.memory.fit.fits else f"{needed}, does not fit"


def _degrees(candidate: Candidate) -> str:
    method = candidate.legal_preview.method
    return f"{method.head_parallel_size} x {method.ring_inner_size} x {method.ring_outer_size}"


def _used_links(legal: Sequence[Candidate]) -> list[str]:
    """Inside the node and between nodes always; host memory where somebody uses it."""
    uses_host = any(one.all_links.host_bytes for candidate in legal for one in candidate.legal_preview.every_pass)
    return ["intra", "inter", "host"] if uses_host else ["intra", "inter"]


def _fastest(legal: Sequence[Candidate]) -> int | None:
    """Index of the candidate with the least predicted time; None without predictions or choice."""
    totals = [sum(_seconds(one) or 0.0 for one in candidate.legal_preview.every_pass) for candidate in legal]
    return totals.index(min(totals)) if len(totals) > 1 and all(totals) else None


def _as_rows(headings: Sequence[str], cells: Sequence[Sequence[str]], best: int | None) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 4 else "right", no_wrap=True)
    for index, row in enumerate(cells):
        table.add_row(*(Text(text) for text in row), style="green" if index == best else None)
    return table


def _as_columns(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    for heading in (headings[0], *(row[0] for row in cells)):
        table.add_column(Text(heading), overflow="fold")
    for index, heading in enumerate(headings[1:], start=1):
        table.add_row(Text(heading, style="bold"), *(Text(row[index]) for row in cells))
    return table


def _table(*headings: str, numbers: bool = False) -> Table:
    table = Table(header_style="bold", padding=(0, 1))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if numbers and index else "left", overflow="fold")
    return table
