"""What a terminal receives, and what people read."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class StrictConsole(Console):
    """A style that rich does not know, which it would pass over, is an error."""

    def get_style(self, name: str | Style, *, default: Style | str | None = None) -> Style:
        return super().get_style(name)


def on_terminal(start: Callable[[int], object]) -> str:
    """All that the process which `start` starts on a terminal writes there; returns at its end."""
    leader, follower = pty.openpty()
    start(follower)
    os.close(follower)
    received = b""
    with contextlib.suppress(OSError):  # the last holder of the other end is gone
        while block := os.read(leader, 65536):
            received += block
    os.close(leader)
    return received.decode()


def text_of(*views: RenderableType, width: int = 200) -> str:
    """What is printed where there is no terminal."""
    stream = io.StringIO()
    for view in views:
        StrictConsole(file=stream, width=width, highlight=False, emoji=False).print(view)
    return stream.getvalue()


def lines_of(*views: RenderableType, width: int = 200) -> list[str]:
    """What is printed, line by line, with single blanks."""
    return [" ".join(line.split()) for line in text_of(*views, width=width).splitlines()]


def styled(*views: RenderableType, width: int = 200) -> list[tuple[str, str]]:
    """The pieces of text that have a style on a terminal, and which."""
    stream = io.StringIO()
    for view in views:
        Console(file=stream, width=width, force_terminal=True, color_system="standard", highlight=False).print(view)
    text = Text.from_ansi(stream.getvalue())
    pieces = [(text.plain[span.start : span.end].strip(), str(span.style)) for span in text.spans]
    return [
        (piece, re.sub(r"color\(([0-7])\)", lambda at: _COLOURS[int(at[1])], style)) for piece, style in pieces if piece
    ]
