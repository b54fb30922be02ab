from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text
from testkit.terminal import text_of

from burst_cli import render
from burst_cli.render import Column, fitted_table, fitting, listing
from engine.runs import figures


@pytest.mark.parametrize(
    ("show", "texts"),
    [
        (figures.count, {0: "0", 999.4: "999", 999.5: "1K", 12_345: "12.3K", 4.56e6: "4.56M", 2e18: "2000P"}),
        (lambda value: figures.count(value, 4), {999.7: "999.7", 999.96: "1K", 12_345: "12.35K"}),
        (figures.binary_bytes, {0: "0 B", 1023: "1023 B", 1023.5: "1 KiB", 999.5 * 2**10: "1000 KiB", 2**20: "1 MiB"}),
        (figures.binary_bytes, {1.5 * 2**30: "1.5 GiB", 5 * 2**50: "5120 TiB"}),
        (figures.seconds, {0.0004: "0.4 ms", 0.25: "250 ms", 0.9995: "1 s", 1.25: "1.25 s", 999.5: "1,000 s"}),
        (figures.duration, {0.4: "0:00", 42: "0:42", 59.7: "1:00", 725: "12:05", 11_045: "3:04:05"}),
        (lambda value: figures.rate(value, "FLOP/s"), {61.44e9: "61.4 GFLOP/s", 989e12: "989 TFLOP/s"}),
        (figures.percent, {0.4567: "45.7%"}),
        (figures.plain, {2.5: "2.5000"}),
    ],
)
def test_figures_read_as_people_write_them(show: Callable[[float | None], str], texts: dict[float, str]) -> None:
    assert {value: show(value) for value in texts} == texts
    assert show(None) == "–"


def test_names_are_folded_and_an_interval_has_one_unit() -> None:
    lists = ([], ["n1"], ["n2", "n1", "n2"], ["a[", "b"])
    assert [render.fold_names(names) for names in lists] == ["", "n1", "n[1-2]", "a[,b"]
    assert figures.seconds_between(0.9995, 0.9, 1.1) == "1 s (0.9…1.1)"


def test_a_listing_keeps_numbers_whole_and_folds_names_where_there_is_little_room() -> None:
    table = listing(("name", "size"), [("n" * 14, "1,234"), ("[b]", "5")], ["size"])
    assert text_of(table, width=17).splitlines() == [
        "name         size",
        "nnnnnnnnnn  1,234",
        "nnnn             ",
        "[b]             5",
    ]


def test_sparkline_spans_low_to_high_within_its_width() -> None:
    assert [render.sparkline(values, 10) for values in ([4.0, 3.0, 2.0], [1.0, 1.0], [])] == ["█▅▁", "▁▁", ""]
    assert len(render.sparkline(list(range(1000)), 24)) == 24


def test_clean_leaves_no_terminal_control() -> None:
    for dirty, text in [
        ("a\x1b[31;1mb\x1b[0mc", "abc"),
        ("\x1b]0;title\x07x", "x"),
        ("a\tb\nc", "a    b\nc"),
        ("bell\x07 back\x08 nul\x00", "bell back nul"),
        ("half \x1b[", "half "),
        ("\x9b31mred", "31mred"),
    ]:
        assert render.clean(dirty) == text


def test_a_table_gives_notes_what_is_left_and_short_names_where_that_is_nothing() -> None:
    columns = [Column("run", is_number=False), Column("step", 2), Column("loss\nof all", 1)]
    rows = [[Text(one) for one in cells] for cells in (("tiny/1", "3/4", "2.5"), ("big/10", "10/40", "11.25"))]
    notes = [Text("[b]died of hunger"), Text()]
    wide, narrow = (fitted_table(columns, rows, notes, width, short=("1", "10")) for width in (24, 17))
    cells = [line.rstrip() for line in (text_of(wide[0], width=24) + text_of(narrow[0], width=17)).splitlines()]
    assert [wide[1], narrow[1], *cells] == [
        *(True, False, "               loss", "run     step of all", "tiny/1   3/4    2.5 [b]…", "big/10 10/40  11.25"),
        *("            loss", "run  step of all", "1     3/4    2.5", "10  10/40  11.25"),
    ]


@pytest.mark.parametrize(("room", "kept"), [(100, [0, 1, 2, 3]), (29, [0, 2, 3]), (20, [2, 3]), (5, [2])])
def test_columns_that_fit_are_those_of_the_lowest_ranks_in_their_own_order(room: int, kept: list[int]) -> None:
    assert fitting([2, 3, 0, 1], [9, 12, 10, 10], room) == kept


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_one_thing_is_named_in_the_singular(number: int, text: str) -> None:
    assert figures.count_of("rank", number) == text


def test_headings_break_between_words_alone() -> None:
    headings = ("validation loss", "tokens/s per device", "peak memory", "attention")
    table = listing(headings, [("x" * 30,) * 4], ruled=True)
    target = StringIO()
    Console(width=50, file=target).print(table)
    shown = target.getvalue().split()
    assert [word for heading in headings for word in heading.split() if word not in shown] == []
