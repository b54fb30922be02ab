"""Conversations: checked, rendered by a chat template, and cut into what the assistant says and what it reads.

Chat templates are Jinja programs as Hugging Face writes them. A template is somebody else's program, so it runs in
Jinja's sandbox, which lets it neither change what it is given nor reach into Python. {% generation %} ...
{% endgeneration %} encloses what the assistant says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.files import json_type, read_text
from engine.data.texts import Spans, Text
from engine.data.tokenizers import TOKENIZER_CONFIG_FILE, special_tokens
from engine.runs.files import hash_json
from engine.runs.records import require_json_object

ROLES = ("system", "user", "assistant", "tool")
CHATML = "chatml"
TEMPLATE_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_BEGIN, _END = "burst_generation_begin", "burst_generation_end"
_CHATML_SOURCE = r"""
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
_FIRST_MARK, _LAST_MARK = 0xFDD0, 0xFDEF  # Unicode sets these aside for programs: no text of people has them
Message = dict[str, Any]


# --- templates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens (bos_token, eos_token, ...) that it may name. name: for errors."""

    name: str
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """Equal for templates that render the same conversation to the same text (but for the time of day)."""
        return hash_json({"source": self.source, "special_tokens": dict(self.special_tokens)})

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template itself says what the assistant writes."""
        return _GENERATION.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str,
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of `messages`. marks: what is put before and after each generation block.

        Raises DataError, which begins with `place`, when the template refuses them or fails.
        """
        given = {"messages": messages, "tools": None, "documents": None, _BEGIN: marks[0], _END: marks[1]}
        try:
            return self._compiled.render(**self.special_tokens, **given, add_generation_prompt=add_generation_prompt)
        except DataError:
            raise
        except Exception as error:  # somebody else's program: anything may go wrong in it
            raise DataError(
                f"{place}: the chat template {self.name} cannot render these messages: {_said(error)}. Mend the line "
                "or the template, or give another data.chat_template."
            ) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template {self.name} is not valid Jinja: line {error.lineno}: {_said(error)}. Mend it, or "
                "give another data.chat_template."
            ) from None


def find_template(config: DataConfig) -> ChatTemplate:
    """The template that `config` names: built in, a file, or the one beside the tokenizer. Raises DataError."""
    folder = None if config.tokenizer in ("bytes", "bpe") else Path(config.tokenizer).expanduser().absolute().parent
    tokens = {} if folder is None else special_tokens(folder)
    if config.chat_template == CHATML:
        return ChatTemplate(CHATML, _CHATML_SOURCE, tokens)
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser().absolute()
        return ChatTemplate(str(path), read_text(path, "a chat template"), tokens)
    if folder is not None:
        path = folder / TEMPLATE_FILE
        if path.is_file():
            return ChatTemplate(str(path), read_text(path, "a chat template"), tokens)
        source = _configured_template(folder)
        if source is not None:
            return ChatTemplate(str(folder / TOKENIZER_CONFIG_FILE), source, tokens)
    raise DataError(
        f"data.messages_field needs a chat template, but data.tokenizer={config.tokenizer} has none beside it (looked "
        f"for {TEMPLATE_FILE} and chat_template in {TOKENIZER_CONFIG_FILE}). Set data.chat_template to {CHATML} or to "
        "a .jinja file."
    )


def _configured_template(folder: Path) -> str | None:
    """chat_template of tokenizer_config.json: a text, or a list of named ones, of which "default" is meant."""
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return None
    found = require_json_object(path, "the settings of a tokenizer", DataError).get("chat_template")
    if isinstance(found, list):
        named = (entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default")
        found = next(named, {}).get("template")
    return found if isinstance(found, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face are written for: these block rules, filters and functions."""
    extensions: list[str | type[Extension]] = [_GenerationBlocks, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime  # the local day
    return environment


class _GenerationBlocks(Extension):
    """{% generation %}: puts the variables _BEGIN and _END around what the block outputs."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates expect it: Jinja's own filter would escape characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _said(error: Exception) -> str:
    """One line of what an error says, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# --- conversations ---------------------------------------------------------------------------------------------------


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


def render_chat(template: ChatTemplate, messages: Sequence[Message], place: str) -> Text:
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
    return Text(text, learned, is_chat=True)


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
    edges = accumulate(map(len, pieces[::2]), initial=0)
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
