"""The bandwidth between nodes for people: a matrix coloured by how each rate compares with the usual one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cluster.checks.bandwidth import BAD_SHARE, ODD_SHARE, BandwidthMatrix

# Marks say the same as the colours, for those who see none.
_MARKS = ((BAD_SHARE, "!! ", "bold white on red"), (ODD_SHARE, "! ", "bold yellow"), (0.9, "", "green"))
_FULL = ("", "bright_green")
_LEGEND = (
    f"Gbit/s over TCP; rows send, columns receive. ! below {ODD_SHARE:.0%}, !! below {BAD_SHARE:.0%} "
    "of the usual rate, ? not measured."
)
_WORST = 10
_CELL_CHARACTERS = 7


def bandwidth_table(matrix: BandwidthMatrix) -> RenderableType:
    """The matrix as a table with colours; where it is too wide for the console, one line per node."""
    return _BandwidthTable(matrix)


class _BandwidthTable:
    def __init__(self, matrix: BandwidthMatrix) -> None:
        self._matrix = matrix

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        matrix = self._matrix
        if not matrix.nodes:
            yield Text("No pair of nodes could be measured.")
        else:
            yield _matrix_table(matrix) if _fits(matrix, options.max_width) else _node_table(matrix)
            yield Text(_LEGEND, style="dim")
        yield from (Text(line) for line in summary_lines(matrix))


def bandwidth_text(matrix: BandwidthMatrix) -> str:
    """The matrix as plain lines, aligned, with marks in place of colours."""
    if not matrix.nodes:
        return "\n".join(["No pair of nodes could be measured.", *summary_lines(matrix)]) + "\n"
    cells = [["", *matrix.nodes]]
    cells += [[node, *(_cell(matrix, node, other)[0] for other in matrix.nodes)] for node in matrix.nodes]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    ]
    return "\n".join([*(line.rstrip() for line in lines), "", _LEGEND, *summary_lines(matrix)]) + "\n"


def summary_lines(matrix: BandwidthMatrix) -> list[str]:
    """What the matrix says: range, odd nodes, odd pairs, what is missing."""
    lines = []
    if matrix.usual_gbps is not None and matrix.minimum_gbps is not None and matrix.median_gbps is not None:
        figures = f"slowest {_rate(matrix.minimum_gbps)}, median {_rate(matrix.median_gbps)}"
        lines.append(f"{figures}, usual {_rate(matrix.usual_gbps)} Gbit/s")
    odd, missing = matrix.odd_pairs(), matrix.unmeasured()
    slow = [(node, _rate(matrix.node_gbps(node) or 0.0)) for node in matrix.odd_nodes()]
    lines += [f"{node} is slow with most others: {rate} Gbit/s" for node, rate in slow]
    lines += [f"{one.source} → {one.target} is slow: {_rate(one.gbps or 0.0)} Gbit/s" for one in odd[:_WORST]]
    lines += [f"{one.source} → {one.target} not measured: {one.problem}" for one in missing[:_WORST]]
    rest = len(odd[_WORST:]) + len(missing[_WORST:])
    if rest:
        lines.append(f"and {rest} more pairs: see --json")
    lines += [f"{node} took no part: {why}" for node, why in matrix.absent.items()]
    return lines


def _matrix_table(matrix: BandwidthMatrix) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("")
    for node in matrix.nodes:
        table.add_column(Text(node), justify="right", no_wrap=True)
    for node in matrix.nodes:
        cells: Sequence[Text] = [Text(*_cell(matrix, node, other)) for other in matrix.nodes]
        table.add_row(Text(node, style="bold"), *cells)
    return table


def _node_table(matrix: BandwidthMatrix) -> Table:
    """Per node the slowest and the median of what it sends and receives; slowest nodes first."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for name in ("node", "median", "slowest", "with"):
        table.add_column(name, justify="left" if name in ("node", "with") else "right", no_wrap=True)
    usual = matrix.usual_gbps or 0.0
    for node in sorted(matrix.nodes, key=lambda one: matrix.node_gbps(one) or 0.0):
        known = [rate for rate in matrix.rates.values() if node in (rate.source, rate.target) and rate.gbps is not None]
        slowest = min(known, key=lambda rate: rate.gbps or 0.0, default=None)
        median = matrix.node_gbps(node)
        if slowest is None or median is None:
            table.add_row(Text(node), Text("?"), Text("?"), Text(""))
            continue
        ways = f"{slowest.source} → {slowest.target}"
        table.add_row(Text(node), _marked(median, usual), _marked(slowest.gbps or 0.0, usual), Text(ways))
    return table


def _marked(gbps: float, usual_gbps: float) -> Text:
    return Text(*_mark(gbps, gbps / usual_gbps if usual_gbps else 1.0))


def _cell(matrix: BandwidthMatrix, source: str, target: str) -> tuple[str, str]:
    """(text, style) of one cell."""
    if source == target:
        return "·", "dim"
    gbps, share = matrix.gbps(source, target), matrix.share(source, target)
    return ("?", "bold magenta") if gbps is None or share is None else _mark(gbps, share)


def _mark(gbps: float, share: float) -> tuple[str, str]:
    mark, style = next(((mark, style) for limit, mark, style in _MARKS if share < limit), _FULL)
    return f"{mark}{_rate(gbps)}", style


def _rate(gbps: float) -> str:
    """Three digits."""
    return f"{gbps:.0f}" if gbps >= 100 else f"{gbps:.1f}" if gbps >= 10 else f"{gbps:.2f}"


def _fits(matrix: BandwidthMatrix, width: int) -> bool:
    names = [max(len(node), _CELL_CHARACTERS) + 2 for node in matrix.nodes]
    return sum(names) + max(len(node) for node in matrix.nodes) + 2 <= width
