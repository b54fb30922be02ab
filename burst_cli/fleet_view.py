"""The table of nodes, as wide as there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH
from burst_cli.fleet_rows import NodeRow, Span, fit_rows, fold_rows

WIDE = 100  # columns for figures and notes
MIDDLE = 72  # columns for figures or notes
_STYLES = {"bad": "bold red", "warn": "yellow", "ok": ""}
_PHASE_STYLES = {"running": "green", "stopping": "yellow", "lost": "bold red", "none": "dim", "ended": ""}
_PHASE_WORDS = {"none": "not started"}


def fleet_view(rows: Sequence[NodeRow], width: int, height: int) -> RenderableType | None:
    """The nodes in at most `height` lines; None when not even one row has room."""
    folded = fold_rows(rows)
    if not folded or height < 2:
        return None
    shown, left_out = fit_rows(folded, height - 1)
    if left_out:
        shown, left_out = fit_rows(folded, height - 2)
    if not shown:
        return None
    table = _table(shown, width)
    if not left_out:
        return table
    return Group(table, Text(f"and {left_out} more nodes: burst status", style="dim"))


def _table(rows: Sequence[NodeRow], width: int) -> Table:
    has_notes = any(row.notes for row in rows) or width < MIDDLE
    table = Table(
        box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0), width=width if has_notes else None
    )
    room = max(8, width // 4)
    columns = [("node", False), ("state", False)]
    if width >= MIDDLE:
        columns += [("heard", True), ("ranks", False), ("GPU", True)]
        # Where there is little room, notes say more than the figures of nodes that are well.
        columns += [("load", True), ("memory", True)] if width >= WIDE or not has_notes else []
    table_cells = [_cells(row, room) for row in rows]
    columns = [column for column in columns if any(cells[column[0]].plain != DASH for cells in table_cells)]
    for name, is_figure in columns:
        table.add_column(name, no_wrap=True, justify="right" if is_figure else "left", overflow="ellipsis")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1 if has_notes else None)
    for row, cells in zip(rows, table_cells, strict=True):
        notes = "; ".join(row.notes) or ("" if width >= MIDDLE else _short(row))
        style = _STYLES[row.mark] if row.notes else "dim"
        table.add_row(*(cells[name] for name, _ in columns), Text(notes, style=style))
    return table


def _cells(row: NodeRow, room: int) -> dict[str, Text]:
    name = row.name if len(row.name) <= room or len(row.nodes) == 1 else f"{len(row.nodes)} nodes"
    return {
        "node": Text(name, style=_STYLES[row.mark]),
        "state": _phase(row),
        "heard": Text(heard_text(row.heard_s)),
        "ranks": Text(ranks_text(row)),
        "GPU": Text(_span(row.gpu, "%")),
        "load": Text(_span(row.load, "", 1)),
        "memory": Text(_span(row.memory, "%", scale=100)),
    }


def ranks_text(row: NodeRow) -> str:
    """`3 R 1 T`: how many ranks are in which state: R runs, S waits, D waits for a device, T is stopped, Z is dead."""
    return " ".join(f"{count} {letter}" for letter, count in row.ranks) or DASH


def heard_text(seconds: float | None) -> str:
    """`now`, `7 s`, `3 min`: how long ago a node last said something."""
    if seconds is None:
        return DASH
    if seconds < 1.5:
        return "now"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _phase(row: NodeRow) -> Text:
    word = "unknown" if row.phase == "none" and row.notes else _PHASE_WORDS.get(row.phase, row.phase)
    return Text(word, style=_PHASE_STYLES.get(row.phase, ""))


def _short(row: NodeRow) -> str:
    """What a narrow table says of nodes that are well."""
    parts = [f"GPU {_span(row.gpu, '%')}" if row.gpu else f"load {_span(row.load, '', 1)}" if row.load else ""]
    return "".join(parts)


def _span(span: Span | None, unit: str, digits: int = 0, scale: float = 1.0) -> str:
    if span is None:
        return DASH
    low, high = (f"{value * scale:.{digits}f}" for value in (span.low, span.high))
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"
