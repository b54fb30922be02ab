"""Every kind of panel as it is drawn: its words in order, its marks by colour, its dashed lines, its description."""

from __future__ import annotations

import html
import re
from collections import Counter

import pytest

from burst_cli.report.draw import METHOD_COLOURS, panel_svg
from burst_cli.report.panels import MEMORY, SPEED, Line, Panel, Point


def line(name: str, style: int, points: dict[float, float], **how: bool) -> Line:
    return Line(name, style, tuple(Point(x, y, 0.9 * y, 1.1 * y) for x, y in points.items()), **how)


def panel(*told: object, **parts: object) -> Panel:
    return Panel(*told, "Title", "x", "y", **parts)  # type: ignore[arg-type]


RING = line("ring", 0, {512: 1000, 1024: 2000, 4096: 30000})
DRAWN = {
    "over lengths, on a logarithmic axis": (
        panel(
            SPEED,
            "lines",
            lines=(RING, line("burst", 9, {1024: 1000})),
            missing=(("lost", 1, 2048), ("lost too", 2, 2048)),
        ),
        "512 1K 2K 4K x 500 1,000 2,000 5,000 10,000 20,000 y OOM ring burst",
        [10, 5, 1],
        0,
        "y over x of ring, burst; lost ran out of memory at 2048 tokens; lost too ran out of memory at 2048 tokens",
    ),
    "every second length where they would touch": (
        panel(MEMORY, "lines", lines=(line("ring", 0, {2.0**power: 1 for power in range(9, 18)}),)),
        "512 2K 8K 32K 128K x 0.00 0.25 0.50 0.75 1.00 1.25 y ring",
        [28],
        0,
        "y over x of ring",
    ),
    "a method per row": (
        panel(
            SPEED,
            "dots",
            lines=(line("ring", 0, {512: 20}), line("burst", 1, {512: 10})),
            missing=(("ring", 0, 512), ("lost", 2, 512)),
        ),
        "0 5 10 15 20 y burst ring lost OOM",
        [3, 3, 1],
        0,
        "y over x of ring, burst; ring ran out of memory at 512 tokens; lost ran out of memory at 512 tokens",
    ),
    "predicted against measured": (
        panel("prediction", "scatter", lines=(line("ring", 0, {1: 2, 3: 2}),)),
        "0 1 2 3 x 0 1 2 3 y dashed: as predicted ring",
        [3],
        1,
        "y over x of ring",
    ),
    "over steps, the second side dashed": (
        panel(
            "step_time_s",
            "curves",
            lines=(
                line("A", 0, dict.fromkeys(range(8), 1.0)),
                line("B", 1, {**dict.fromkeys(range(200), 2.0), 200: 90.0}, is_dashed=True),
            ),
        ),
        "0 40 80 120 160 200 x 0.0 0.5 1.0 1.5 2.0 2.5 y A B",
        [2, 1],
        2,
        "y over x of A, B",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_panel_as_it_is_drawn(name: str) -> None:
    shown, words, marks, dashed, described = DRAWN[name]
    svg = panel_svg(shown)
    assert " ".join(html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)) == words
    colours = Counter(re.findall(r'<use [^>]*style="fill: (#\w+)', svg))
    assert [colours[colour] for colour in METHOD_COLOURS if colour in colours] == marks
    assert svg.count("stroke-dasharray") == dashed
    assert shown.described == f"Title. {described}"
