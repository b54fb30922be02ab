"""Text on its way from a source to tokens, with what of it is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PIECE_BYTES = 1 << 20  # text is handled in pieces of about this size
Spans = tuple[tuple[int, int], ...]  # characters [first, after) of a text, ascending


@dataclass(frozen=True)
class Text:
    """A document or a part of one. learned: characters that a model learns to write; null: all of them.

    is_chat: a rendered conversation, in which special tokens are what they spell.
    """

    text: str
    learned: Spans | None = None
    is_chat: bool = False


def split_text(text: str, learned: Spans | None = None) -> Iterator[Text]:
    """Pieces of at most PIECE_BYTES characters that join to `text`, cut after a line break where there is one."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        cut = text.rfind("\n", start, start + PIECE_BYTES) + 1 or start + PIECE_BYTES
        yield Text(text[start:cut], learned)
        start = cut
    yield Text(text[start:], learned)
