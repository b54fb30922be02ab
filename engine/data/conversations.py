"""Rows of conversation data: every key beyond role and content is honoured, or the row is refused by name.

    messages               under data.messages_field; every key of a message goes to the template
    tools, documents,      under these names, as transformers' apply_chat_template takes them; a JSON text of one, as
    chat_template_kwargs   tables store them, is decoded
    weight, train, ...     on a message: whether an assistant's turn is learned (LEARNING_KEYS)

Other keys of a row are columns that training does not use. Other keys of a message must reach the rendered text, but
for those that only identify it (REFERENCE_KEYS).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config.errors import DataError

Message = dict[str, Any]

# Keys with which trainers mark whether a message is learned: OpenAI and Mistral weight, axolotl train and
# training, ms-swift loss, NeMo loss_mask.
LEARNING_KEYS = frozenset({"weight", "train", "trainable", "training", "loss", "loss_mask", "loss_weight"})
# Keys that identify a message or link it to another. Many templates ignore them, and no text is lost with them.
REFERENCE_KEYS = frozenset({"id", "name", "tool_call_id", "timestamp", "source", "metadata"})
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the first is the one that templates read
_TABLE_KEYS: dict[str, Any] = {"tools": list, "documents": list, "chat_template_kwargs": dict}
_RENAMED = {"functions": "tools", "system": "a message with the role system", "template_kwargs": "chat_template_kwargs"}
_COMPARED = frozenset({"type", "role", "id", "tool_call_id"})
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})


@dataclass(frozen=True)
class Conversation:
    """One row: the input of a template, and which messages are labels.

    learned: per message; only an assistant's can be. columns: the other keys of the row that hold a value.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    documents: tuple[dict[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    learned: tuple[bool, ...] = ()
    columns: frozenset[str] = frozenset()

    def until(self, count: int) -> Conversation:
        """Return the conversation with its first `count` messages only."""
        return replace(self, messages=self.messages[:count], learned=self.learned[:count])


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"the key {key[:40]!r} is given twice in one object, so a value would be lost; remove one")
    return found


# The hook costs 7% of the time of rows of text and 40% of that of conversations; both are read at over 250 MB/s, many
# times faster than tokens are made of them.
parse_json = json.JSONDecoder(object_pairs_hook=_unique_keys).decode


def read_conversation(row: Mapping[str, Any], messages: list[Any], location: str) -> Conversation:
    """Build the conversation of `row` from its messages. location: FILE:LINE.

    Raises DataError for malformed messages, marks that disagree, and values of another form.
    """
    for key in row.keys() & _RENAMED.keys():
        if row[key]:
            raise _bad(location, f"the row has {key!r}, which no template gets. Write it as {_RENAMED[key]}")
    if _learning_mark(row, f"{location}: the row") is False:
        raise _bad(location, "the row is marked as not learned. Leave such lines out")
    for index, message in enumerate(messages):
        _check_message(message, f"{location}: message {index}")
    learned = tuple(_is_learned(message, f"{location}: message {index}") for index, message in enumerate(messages))
    if not any(message["role"] == "assistant" for message in messages):
        raise _bad(
            location,
            f"the assistant has no text in any of the {len(messages)} messages, so nothing would be learned. "
            "Leave such lines out",
        )
    if not any(learned):
        raise _bad(location, "every message of the assistant is marked as not learned. Leave such lines out")
    tools, documents, kwargs = (_table(row, key, location) for key in _TABLE_KEYS)
    for key in kwargs or ():
        if key in _RESERVED:
            raise _bad(location, f"chat_template_kwargs sets {key!r}, which the row itself gives. Leave it out")
    columns = frozenset(key for key, value in row.items() if value is not None) - _TABLE_KEYS.keys()
    return Conversation(
        tuple(messages),
        None if tools is None else tuple(tools),
        None if documents is None else tuple(documents),
        kwargs or {},
        learned,
        columns,
    )


def _bad(location: str, why: str) -> DataError:
    return DataError(f"{location}: {why}.")


def _bad_mark(owner: str, why: str) -> DataError:
    return DataError(f"{owner} {why}.")


def _check_message(message: Any, location: str) -> None:
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
        raise DataError(
            f"{location} is {message!r:.80}, in the form of ShareGPT; expected the keys role and content. Convert it: "
            "from becomes role (human: user, gpt: assistant; system and tool stay), value becomes content."
        )
    if not (isinstance(message, dict) and isinstance(message.get("role"), str) and message["role"]):
        raise DataError(
            f"{location} is {message!r:.80}; expected an object with role and content. Mend the line or leave it out."
        )
    content = message.get("content")
    if content is None:
        if any(message.get(key) for key in ("tool_calls", "function_call", *REASONING_KEYS)):
            return
        raise DataError(
            f"{location} is {message!r:.80}; expected a string as content; only a message with tool_calls may lack it. "
            'Mend the line, write "" for an empty text, or leave the line out.'
        )
    if not isinstance(content, str) and not (isinstance(content, list) and all(map(_is_text_part, content))):
        raise DataError(
            f"{location} is {message!r:.80}; expected a string as content, or a list of parts "
            '{"type": "text", "text": ...}. Mend the line or leave it out.'
        )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_learned(message: Message, location: str) -> bool:
    mark, is_assistant = _learning_mark(message, location), message["role"] == "assistant"
    if mark and not is_assistant:
        raise _bad_mark(
            location,
            f"has the role {message['role']!r} and is marked to be learned, but only messages of the "
            "assistant are. Remove the mark, or leave the line out",
        )
    return is_assistant and mark is not False


def _learning_mark(record: Mapping[str, Any], location: str) -> bool | None:
    """Return the value of the keys of LEARNING_KEYS, None if there is none. Raises DataError if they disagree."""
    marks = {key: record[key] for key in record if key in LEARNING_KEYS and record[key] is not None}
    for key, value in marks.items():
        if not (isinstance(value, bool | int | float) and value in (0, 1)):
            raise _bad_mark(
                location,
                f"has {key}={value!r}; expected 0 or false (read, not learned), or 1 or true. Parts and "
                "other weights are not implemented: mend the line or leave it out",
            )
    if len({bool(value) for value in marks.values()}) > 1:
        listed = " and ".join(f"{key}={value!r}" for key, value in marks.items())
        raise _bad_mark(location, f"has {listed}, which contradict each other. Remove all but one")
    return bool(next(iter(marks.values()))) if marks else None


def _table(row: Mapping[str, Any], key: str, location: str) -> Any:
    """Return the value under `key` of a row, decoded if it is JSON text; None if there is none."""
    value: Any = row.get(key)
    kind: Any = _TABLE_KEYS[key]
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except (ValueError, RecursionError):
            value = row[key]
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is list and not all(isinstance(item, dict) for item in value)):
        what = "an object" if kind is dict else "a list of objects"
        raise _bad(location, f"{key!r} is {value!r:.60}; expected {what}, or the JSON text of it. Mend the line")
    return value


# --- traces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A part of a conversation that must reach the text: the value under `key`, or the item `nth` of that list.

    message: index of its message; None for tools and documents, which belong to the row. is_beginning: of that content
    only its first character, as templates cut the reasoning off that a content begins with.
    """

    message: int | None
    key: str
    nth: int | None = None
    is_beginning: bool = False

    def __str__(self) -> str:
        item = "" if self.nth is None else f"[{self.nth}]"
        part = "the beginning of " if self.is_beginning else ""
        return f"{part}{self.key}{item} of " + ("the row" if self.message is None else f"message {self.message}")

    def removed_from(self, conversation: Conversation) -> Conversation:
        """Return the conversation without this part."""
        if self.message is None:
            return replace(conversation, **{self.key: self._rest(getattr(conversation, self.key))})
        changed = dict(conversation.messages[self.message])
        changed[self.key] = self._rest(changed[self.key])
        messages = (*conversation.messages[: self.message], changed, *conversation.messages[self.message + 1 :])
        return replace(conversation, messages=messages)

    def _rest(self, value: Any) -> Any:
        if self.is_beginning and self.nth is not None:
            return [*value[: self.nth], _without_beginning(value[self.nth]), *value[self.nth + 1 :]]
        if self.is_beginning:
            return _without_beginning(value)
        return None if self.nth is None else (value[: self.nth] + value[self.nth + 1 :]) or None


def trace(conversation: Conversation, tag: str) -> tuple[Conversation, list[Unit]]:
    """(the conversation with `tag`, the number of the unit and `tag` after every string of a unit, its units).

    Those of a beginning are before it. Rendered, the conversation shows which of the units reach the text, and where.
    """
    units: list[Unit] = []

    def traced_unit(value: Any, unit: Unit) -> Any:
        units.append(unit)
        tagged = _tagged(value, f"{tag}{len(units) - 1}{tag}")
        if unit.key != "content" or len(_text_of(value).strip()) < 2:
            return tagged
        units.append(replace(unit, is_beginning=True))
        return _with_text(tagged, f"{tag}{len(units) - 1}{tag}{_text_of(tagged)}")

    def traced(value: Any, message: int | None, key: str) -> Any:
        if not isinstance(value, list | tuple):
            return traced_unit(value, Unit(message, key))
        return type(value)([traced_unit(item, Unit(message, key, nth)) for nth, item in enumerate(value)])

    messages = tuple(
        {key: traced(value, index, key) if _must_be_rendered(message, key) else value for key, value in message.items()}
        for index, message in enumerate(conversation.messages)
    )
    tables: dict[str, Any] = {
        key: table and traced(table, None, key)
        for key, table in (("tools", conversation.tools), ("documents", conversation.documents))
    }
    return replace(conversation, messages=messages, **tables), units


def _text_of(content: Any) -> str:
    """Return the text of a content, or of a part of one."""
    return content if isinstance(content, str) else content["text"]


def _with_text(content: Any, text: str) -> Any:
    return text if isinstance(content, str) else {**content, "text": text}


def _without_beginning(content: Any) -> Any:
    return _with_text(content, _text_of(content).lstrip()[1:])


def _must_be_rendered(message: Message, key: str) -> bool:
    if key == "role" or key in LEARNING_KEYS | REFERENCE_KEYS or message[key] in (None, "", [], {}):
        return False
    twin = REASONING_KEYS.index(key) if key in REASONING_KEYS else 0
    return message[key] not in [message.get(other) for other in REASONING_KEYS[:twin]]  # one text under two names


def _tagged(value: Any, tag: str) -> Any:
    """Return `value` with `tag` after each string, except those that templates compare or check the length of."""
    if isinstance(value, str):
        return value + tag
    if isinstance(value, dict):
        return {key: item if key in _COMPARED else _tagged(item, tag) for key, item in value.items()}
    return [_tagged(item, tag) for item in value] if isinstance(value, list) else value


def as_transformers_passes(messages: tuple[Message, ...]) -> Iterator[Message]:
    """Return the messages as apply_chat_template passes them: without nulls, reasoning under all its names."""
    for message in messages:
        known = {key: value for key, value in message.items() if value is not None}
        reasoning = next((known[key] for key in REASONING_KEYS if key in known), None)
        if reasoning is not None:
            known = {"thinking": reasoning, **known, "reasoning_content": reasoning}
        yield known
