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
from functools import cached_property, partial
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.pretrained.folder import MORE_TEMPLATES_FOLDER, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, open_tokenizer
from engine.runs.files import hash_json

ROLES = ("system", "user", "assistant", "tool")
CHATML = "chatml"
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
Message = dict[str, Any]
Spans = tuple[tuple[int, int], ...]  # characters [first, after) of a text, ascending


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

    def render_chat(self, messages: list[Message], place: str) -> tuple[str, Spans]:
        """(the text of `messages`, what of it the assistant says).

        A template with {% generation %} blocks says so itself. Of any other the turns are found by rendering: up to a
        turn with the generation prompt, then with the turn; what was added is the turn. White space after the mark
        that ends a turn is no part of it: nobody waits for that. Raises DataError, which begins with `place`, for what
        are no messages and when what was rendered does not grow turn by turn.
        """
        _check_messages(messages, place)
        text = self.render(messages, place)
        has_blocks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source)
        learned = (self._marked if has_blocks else self._grown)(messages, text, place)
        if not learned:
            raise self._unusable(place, "renders nothing that the assistant says. Give the assistant a text")
        return text, learned

    def render(
        self, messages: Sequence[Message], place: str, *, prompts: bool = False, marks: Sequence[str] = ("", "")
    ) -> str:
        """The text of `messages`; prompts: with the beginning of an answer. marks: around generation blocks.

        Raises DataError, which begins with `place`, when the template refuses them or fails.
        """
        given: dict[str, Any] = {
            "messages": messages,
            "tools": None,
            "documents": None,
            _BEGIN: marks[0],
            _END: marks[1],
        }
        template = self._compiled
        try:
            return template.render(**self.special_tokens, **given, add_generation_prompt=prompts)
        except Exception as error:  # somebody else's program: anything may go wrong in it
            why = f"cannot render these messages: {_said(error)}. Mend the line or the template"
            raise self._unusable(place, why) from None

    def _marked(self, messages: Sequence[Message], text: str, place: str) -> Spans:
        # Unicode sets those from U+FDD0 on aside for programs: of people's texts few have one.
        marks = [*islice((mark for mark in map(chr, count(0xFDD0)) if mark not in text), 2)]
        pieces = re.split("([{}{}])".format(*marks), self.render(messages, place, marks=marks))
        if "".join(pieces[::2]) != text or pieces[1::2] != marks * (len(pieces) // 4):
            raise self._unusable(
                place,
                "changes or nests its generation blocks, so what the assistant says is not known. Output the blocks as "
                "they are",
            )
        edges = accumulate(map(len, pieces[::2]), initial=0)
        # Pieces alternate: read, said, read, ..., read.
        return tuple((first, after) for first, after in list(pairwise(edges))[1::2] if first < after)

    def _grown(self, messages: Sequence[Message], text: str, place: str) -> Spans:
        learned = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], place, prompts=True)
            with_turn = self.render(messages[: index + 1], place)
            if not (with_turn.startswith(before) and text.startswith(with_turn)):
                raise self._unusable(
                    place,
                    f"renders earlier messages another way once message {index} is there, so what the assistant says "
                    "cannot be found. Put {% generation %} ... {% endgeneration %} around it in the template",
                )
            after = len(before) + _turn_length(with_turn[len(before) :], message["content"])
            if after > len(before):
                learned.append((len(before), after))
        return tuple(learned)

    def _unusable(self, place: str, why: str) -> DataError:
        return DataError(f"{place}: the chat template {self.name} {why}, or give another data.chat_template.")

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # What templates of Hugging Face are written for: these block rules, filters and functions.
        extensions: list[str | type[Extension]] = [_GenerationBlocks, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.now().strftime  # the local day
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise self._unusable(f"line {error.lineno}", f"is not valid Jinja: {_said(error)}. Mend it") from None


class _GenerationBlocks(Extension):
    """{% generation %}: puts the variables _BEGIN and _END around what the block outputs."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _said(error: Exception) -> str:
    """One line of what an error says, without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _turn_length(turn: str, content: str) -> int:
    """Characters of `turn` without the white space that follows the mark of its end, if it has such a mark."""
    said = content.strip()  # what some templates make of it
    found = turn.find(said)
    has_mark = found < 0 or turn[found + len(said) :].strip() != ""
    return len(turn.rstrip()) if has_mark else len(turn)


def find_template(config: DataConfig) -> ChatTemplate:
    """The template that `config` names: built in, a file, or the one of the tokenizer's folder. Raises DataError."""
    path = config.tokenizer_path
    files = None if path is None else open_tokenizer(path.absolute())
    tokens = {} if files is None else files.special_tokens
    if config.chat_template == CHATML:
        return ChatTemplate(CHATML, _CHATML_SOURCE, tokens)
    if config.chat_template is not None:
        return _template_file(Path(config.chat_template).expanduser().absolute(), tokens)
    sources = {} if files is None else files.chat_templates
    if "default" in sources:
        return ChatTemplate(sources["default"].place, sources["default"].text, tokens)
    named = f"; it has others: {', '.join(sources)}" if sources else ""
    raise DataError(
        f"data.messages_field needs a chat template, but data.tokenizer={config.tokenizer} has none beside it (looked "
        f"for {TEMPLATE_FILE} and chat_template in {TOKENIZER_CONFIG_FILE}{named}). Set data.chat_template to {CHATML} "
        f"or to a .jinja file, such as one of {MORE_TEMPLATES_FOLDER}."
    )


def _template_file(path: Path, tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(str(path), path.read_text(encoding="utf-8"), tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; expected a chat template.") from None


def _check_messages(messages: list[Any], place: str) -> None:
    """Raises DataError unless they are objects with a known role and a text, one of them the assistant's.

    Further keys of a message are left to the template. place: FILE:LINE.
    """
    for index, message in enumerate(messages):
        known = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not known:
            raise DataError(
                f"{place}: message {index} is {message!r:.80}; expected an object with a role ({', '.join(ROLES)}) and "
                "a string as content. Mend the line or leave it out."
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{place}: the assistant says nothing in its {len(messages)} messages, so nothing would be learned. Leave "
            "such lines out."
        )
