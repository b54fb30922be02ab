"""Conversations: checked, rendered by a chat template, and cut into what the assistant says and what it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.data.files import json_type
from engine.data.texts import Chat, Spans
from engine.errors import DataError

if TYPE_CHECKING:
    from engine.data.chat_template import ChatTemplate

ROLES = ("system", "user", "assistant", "tool")
_FIRST_MARK, _LAST_MARK = 0xFDD0, 0xFDEF  # Unicode sets these aside for programs: no text of people has them

Message = dict[str, Any]


def read_messages(value: object, place: str, field: str) -> list[Message]:
    """The messages in `value`, which stands under the key `field` at `place` (FILE:LINE).

    Raises DataError unless they are a list of objects with a known role and a text, one of them the assistant's.
    Further keys of a message are left to the template.
    """
    if not isinstance(value, list):
        raise DataError(
            f"{place}: '{field}' is a JSON {json_type(value)}; expected a list of messages such as "
            '[{"role": "user", "content": "..."}, ...]. Mend the line or set data.messages_field to another key.'
        )
    for index, message in enumerate(value):
        wrong = _wrong_with(message)
        if wrong:
            raise DataError(
                f"{place}: {field}[{index}] {wrong}; expected an object with a role ({', '.join(ROLES)}) and a string "
                "as content. Mend the line or leave it out."
            )
    if not any(message["role"] == "assistant" for message in value):
        raise DataError(
            f"{place}: the assistant says nothing in the {len(value)} messages of '{field}', so nothing would be "
            "learned. Leave such lines out."
        )
    return value


def _wrong_with(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"is a JSON {json_type(message)}"
    for key in ("role", "content"):
        if key not in message:
            return f"has no {key}"
        if not isinstance(message[key], str):
            return f"has a JSON {json_type(message[key])} as {key}"
    return None if message["role"] in ROLES else f"has the role {message['role']!r}"


def render_chat(template: ChatTemplate, messages: Sequence[Message], place: str) -> Chat:
    """The text of a conversation, with what of it the assistant says.

    A template with {% generation %} blocks says so itself. Of any other the turns are found by rendering: up to a turn
    with the generation prompt, then with the turn; what was added is the turn. White space after the mark that ends a
    turn is no part of it: nobody waits for that. Raises DataError when what was rendered does not grow turn by turn.
    """
    if template.has_generation_blocks:
        text, learned = _marked_spans(template, messages, place)
    else:
        text, learned = _spans_by_growth(template, messages, place)
    if not learned:
        raise DataError(
            f"{place}: the chat template {template.name} renders nothing that the assistant says. Give the assistant "
            "a text, or another data.chat_template."
        )
    return Chat(text, learned)


def _marked_spans(template: ChatTemplate, messages: Sequence[Message], place: str) -> tuple[str, Spans]:
    text = template.render(messages, place)
    free = [chr(code) for code in range(_FIRST_MARK, _LAST_MARK + 1) if chr(code) not in text]
    marks = (free[0], free[1]) if len(free) > 1 else ("", "")
    pieces = re.split(f"([{marks[0]}{marks[1]}])", template.render(messages, place, marks=marks)) if marks[0] else []
    if "".join(pieces[::2]) != text or pieces[1::2] != list(marks) * (len(pieces) // 4):
        raise DataError(
            f"{place}: the chat template {template.name} changes or nests its generation blocks, so what the assistant "
            "says is not known. Output the blocks as they are, or give another data.chat_template."
        )
    edges = np.cumsum([0, *map(len, pieces[::2])]).tolist()
    # Pieces alternate: read, said, read, ..., read.
    return text, tuple((first, after) for first, after in list(pairwise(edges))[1::2] if first < after)


def _spans_by_growth(template: ChatTemplate, messages: Sequence[Message], place: str) -> tuple[str, Spans]:
    text = template.render(messages, place)
    learned = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:index], place, add_generation_prompt=True)
        with_turn = template.render(messages[: index + 1], place)
        if not (with_turn.startswith(before) and text.startswith(with_turn)):
            raise DataError(
                f"{place}: the chat template {template.name} renders earlier messages another way once message {index} "
                "is there, so what the assistant says cannot be found. Put {% generation %} ... {% endgeneration %} "
                "around it in the template, or give another data.chat_template."
            )
        after = len(before) + _turn_length(with_turn[len(before) :], message["content"])
        if after > len(before):
            learned.append((len(before), after))
    return text, tuple(learned)


def _turn_length(turn: str, content: str) -> int:
    """Characters of `turn` without the white space that follows the mark of its end, if it has such a mark."""
    said = content.strip()  # what some templates make of it
    found = turn.find(said)
    has_mark = found < 0 or turn[found + len(said) :].strip() != ""
    return len(turn.rstrip()) if has_mark else len(turn)


def learned_tokens(offsets: npt.NDArray[np.int64], learned: Spans, length: int) -> npt.NDArray[np.bool_]:
    """Which tokens stand for a learned character, bool [tokens].

    offsets: int64 [tokens, 2], the characters [first, after) of each in a text of `length` characters.
    """
    is_learned = np.zeros(length + 1, dtype=np.int64)
    for first, after in learned:
        is_learned[first + 1 : after + 1] = 1
    count = np.cumsum(is_learned)
    return np.asarray(count[offsets[:, 1]] > count[offsets[:, 0]])
