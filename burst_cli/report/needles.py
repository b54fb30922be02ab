"""Needles of the evaluations of a group, as a grid of depths over lengths. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from burst_cli.evaluation_view import number_of, rows_of
from burst_cli.figures import percent
from burst_cli.report.panels import Cell, Panel
from burst_cli.report.values import Record, tokens, whole

TABLE = "final_needle_by_depth"


def needle_panel(records: Sequence[Record]) -> Panel | None:
    """The grid of the newest run of every length that looked for needles; None when none did.

    A cell says the share of right answers and the gain; its colour is the gain, the fuller the larger.
    """
    newest = {length: record for record in records if (length := whole(record, "seq_len")) and rows_of(record, TABLE)}
    cells = [
        (tokens(length), row) for length, record in sorted(newest.items()) for row in _by_depth(rows_of(record, TABLE))
    ]
    if not cells:
        return None
    most = max(0.0, *(number_of(row, "gain") or 0.0 for _, row in cells))
    shares = [number_of(row, "accuracy") or 0.0 for _, row in cells]
    return Panel(
        "needles",
        "grid",
        f"Needles: {percent(sum(shares) / len(shares))} found; what one saves at most: {most:.3g} nats per token",
        "sequence length (tokens)",
        "depth of the needle",
        (),
        cells=tuple(_cell(length, row, most) for length, row in cells),
    )


def _by_depth(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Rows that say their depth, from the start of the text to its end."""
    known = [(depth, index) for index, row in enumerate(rows) if (depth := number_of(row, "depth")) is not None]
    return [rows[index] for _, index in sorted(known)]


def _cell(length: str, row: Mapping[str, object], most: float) -> Cell:
    gain = number_of(row, "gain")
    share = percent(number_of(row, "accuracy"))
    text = share if gain is None else f"{share}, {gain:+.2f}"
    return Cell(length, percent(number_of(row, "depth")), (gain or 0.0) / most if most > 0 else 0.0, text)
