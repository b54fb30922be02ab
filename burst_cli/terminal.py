"""What is printed reaches a terminal of any encoding: signs that it lacks become ASCII, letters their escapes.

One place for all of it: an error handler of the standard streams, so that no verb can fail while it prints. Rich draws
boxes and bars in ASCII by itself where the stream is not UTF-8. Standard library only: every verb begins with this.
"""

from __future__ import annotations

import codecs
import sys
from typing import TextIO

_HANDLER = "burst_ascii"
# One sign each, so that columns stay aligned.
_SIGNS = str.maketrans(
    {
        **dict(zip("…→·•×–—│─°", "~>.*x--|-o", strict=True)),
        **dict.fromkeys("├└┌┐┘┤┼╭╮╰╯", "+"),
        **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)),  # bars, low to high
    }
)


def use_any_encoding() -> None:
    """From now on nothing that is printed to stdout or stderr fails for its encoding."""
    codecs.register_error(_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # what tests put in their place may have none
        if reconfigure is not None:
            reconfigure(errors=_HANDLER)


def can_write(stream: TextIO, text: str) -> bool:
    """Whether `stream` has every letter of `text`: documents for programs are otherwise written in ASCII."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end].translate(_SIGNS)
    return "".join(map(_letter, letters)), error.end


def _letter(letter: str) -> str:
    if letter.isascii():
        return letter
    if "\u2800" <= letter <= "\u28ff":  # the patterns of a spinner
        return "*"
    return letter.encode("ascii", "backslashreplace").decode("ascii")
