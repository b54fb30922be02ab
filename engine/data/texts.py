"""Text that carries what of it is learned: strings that sources give and later stages tell apart."""

from __future__ import annotations

Spans = tuple[tuple[int, int], ...]  # characters [first, after) of a text, ascending


class Prompt(str):
    """Text that a model reads and does not learn to write: no token of it is a label."""

    __slots__ = ()


class Chat(str):
    """A rendered conversation. learned: the characters that the assistant says, ends of its turns included."""

    learned: Spans

    def __new__(cls, text: str, learned: Spans) -> Chat:
        chat = super().__new__(cls, text)
        chat.learned = learned
        return chat
