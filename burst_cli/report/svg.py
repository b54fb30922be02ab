"""A panel as an <svg> element for a page: scales with it, takes its colours, carries no script and no foreign link."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from burst_cli.report.draw import GRID, HEIGHT, INK, METHOD_COLOURS, PAPER, QUIET, WIDTH, draw_panel, drawing
from burst_cli.report.markup import Markup, escape
from burst_cli.report.panels import Panel

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VARIABLES = {
    **{colour: f"var(--m{index})" for index, colour in enumerate(METHOD_COLOURS)},
    INK: "var(--ink)",
    QUIET: "var(--quiet)",
    GRID: "var(--grid)",
    PAPER: "var(--card)",
}
_COLOUR = re.compile("|".join(_VARIABLES))
_MARGINS = {"left": 0.125, "right": 0.97, "top": 0.975, "bottom": 0.15}
_NARROW_NAMES = 0.011  # of the width, per character of the names beside a panel of dots


def panel_svg(panel: Panel, prefix: str) -> Markup:
    """The picture of `panel`; ids begin with `prefix`, because a page has one set of ids for all its pictures."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(WIDTH, HEIGHT))
        FigureCanvasSVG(figure)
        draw_panel(figure.add_subplot(), panel)
        margins = dict(_MARGINS)
        if panel.kind == "grid":
            margins["left"] = 0.165
        if panel.kind == "dots":
            margins["left"] = 0.05 + _NARROW_NAMES * 1.5 * min(22, panel.width_of_names)
        figure.subplots_adjust(**margins)
        figure.patch.set_visible(False)
        figure.axes[0].patch.set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue(), prefix, panel)


def _for_page(text: str, prefix: str, panel: Panel) -> Markup:
    root = ElementTree.fromstring(text)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        _rewrite(element, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", f"{panel.title}. {_described(panel)}")
    ElementTree.register_namespace("", _SVG)
    written = ElementTree.tostring(root, encoding="unicode")
    return Markup(written.replace(f' xmlns="{_SVG}"', "", 1).replace(f' xmlns:xlink="{_XLINK}"', ""))


def _rewrite(element: ElementTree.Element, prefix: str) -> None:
    """Colours become variables, ids and links to them get the prefix, xlink:href becomes href."""
    link = element.attrib.pop(f"{{{_XLINK}}}href", None)
    if link is not None:
        element.set("href", f"#{prefix}{link.removeprefix('#')}")
    if "id" in element.attrib:
        element.set("id", f"{prefix}{element.attrib['id']}")
    for name in ("style", "fill", "stroke"):
        if name in element.attrib:
            element.set(name, _COLOUR.sub(lambda found: _VARIABLES[found[0]], element.attrib[name]))
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{prefix}"))


def _described(panel: Panel) -> str:
    """What a picture holds, for people who do not see it; the figures are in the table below it."""
    lost = ", ".join(f"{name} ran out of memory at {length} tokens" for name, _, length in panel.missing)
    if panel.kind == "grid":
        return "; ".join(f"{cell.column} tokens, depth {cell.row}: {cell.text}" for cell in panel.cells)
    names = ", ".join(line.name for line in panel.lines)
    return f"{panel.y_label} over {panel.x_label} of {names}" + (f"; {lost}" if lost else "")


_SHAPES = {
    "o": '<circle cx="0" cy="0" r="4"/>',
    "s": '<rect x="-3.6" y="-3.6" width="7.2" height="7.2"/>',
    "^": '<path d="M0-4.4 4.2 3.6-4.2 3.6z"/>',
    "v": '<path d="M0 4.4 4.2-3.6-4.2-3.6z"/>',
    "D": '<path d="M0-4.8 4.8 0 0 4.8-4.8 0z"/>',
    "P": '<path d="M-1.6-4.4h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z"/>',
    "X": '<path d="M-1.6-4.4h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z" transform="rotate(45)"/>',
    "*": '<path d="M0-5 1.2-1.6 4.8-1.5 1.9.6 2.9 4 0 2-2.9 4-1.9.6-4.8-1.5-1.2-1.6z"/>',
}


def legend_mark(marker: str, number: int, *, hollow: bool = False, dashed: bool = False) -> Markup:
    """The sign of one line in a legend: its marker on a stroke."""
    look = f'fill="var(--{"card" if hollow else f"m{number}"})" stroke="var(--m{number})" stroke-width="1.3"'
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return Markup(
        f'<svg class="mark" viewBox="-13 -7 26 14" aria-hidden="true"><path d="M-13 0H13" stroke="var(--m{number})" '
        f'stroke-width="1.6"{dashes}/><g {look}>{_SHAPES[escape(marker)]}</g></svg>'
    )
