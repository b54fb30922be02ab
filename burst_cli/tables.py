"""Tables: plain listings, and those for terminals of any width, with the columns that have room and a note per row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH

_GAP = 1
_LEAST_WITH_NOTES = 60  # columns of a terminal; on narrower ones notes get what is left


@dataclass(frozen=True)
class Column:
    """title: in as many lines as it has. rank: who stays on a narrow terminal, lowest first."""

    title: str
    rank: int = 0
    is_number: bool = True


def listing(
    headings: Iterable[str], rows: Iterable[Sequence[str | Text]], numbers: Collection[str] = (), *, ruled: bool = False
) -> Table:
    """All cells of `rows` whole and as they are, never as markup; `numbers`: headings whose columns stand right."""
    table = Table(header_style="bold") if ruled else Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_number = heading in numbers
        no_wrap = is_number and not ruled
        table.add_column(Text(heading), justify="right" if is_number else "left", no_wrap=no_wrap, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def styled(cells: Iterable[str], style: str) -> list[Text]:
    """A row of a listing, all of it in this style."""
    return [Text(cell, style) for cell in cells]


def fitting(ranks: Sequence[int], widths: Sequence[int], room: int) -> list[int]:
    """The places of the columns of a table that fit into `room`, those of the lowest ranks; at least one."""
    kept: list[int] = []
    for place in sorted(range(len(ranks)), key=lambda place: ranks[place]):
        if not kept or sum(widths[one] for one in kept) + widths[place] <= room:
            kept.append(place)
    return sorted(kept)


def fitted_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Text]],
    notes: Sequence[Text],
    width: int,
    *,
    notes_room: int | None = None,
    short: Sequence[str] | None = None,
) -> tuple[Table, bool]:
    """(the cells of `rows` that have room, and the note of each row, whether all cells have room as they are).

    Columns that no row fills are left out. notes_room: kept free for notes. short: what stands in the first column
    where not all have room.
    """
    filled = [place for place in range(len(columns)) if any(row[place].plain != DASH for row in rows)]
    columns, rows = [columns[place] for place in filled], [[row[place] for place in filled] for row in rows]
    has_notes = any(notes)
    room = width - (width // 4 if has_notes and width >= _LEAST_WITH_NOTES else 0)
    is_whole = sum(_widths(columns, rows)) <= room
    if short is not None and not is_whole:
        rows = [[Text(name), *row[1:]] for name, row in zip(short, rows, strict=True)]
    if has_notes and notes_room is not None:
        room = width - notes_room
    widths = [min(wide, width // 2) for wide in _widths(columns, rows)]  # names may be as long as one likes
    kept = fitting([column.rank for column in columns], widths, room)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    table.width = width if has_notes else None
    for place in kept:
        justify = "right" if columns[place].is_number else "left"
        table.add_column(columns[place].title, no_wrap=True, justify=justify, max_width=width // 2)  # type: ignore[arg-type]
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1 if has_notes else None)
    for row, note in zip(rows, notes, strict=True):
        table.add_row(*(row[place] for place in kept), note)
    return table, is_whole


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> list[int]:
    return [
        _GAP + max([*map(len, column.title.split("\n")), *(row[place].cell_len for row in rows)])
        for place, column in enumerate(columns)
    ]
