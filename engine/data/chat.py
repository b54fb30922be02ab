"""Conversations: checked, rendered by a chat template, and split into the assistant's text (labels) and the rest.

Chat templates are Jinja programs in the format of Hugging Face. A template is untrusted code, so it runs in Jinja's
sandbox, where it can neither modify its arguments nor access Python. {% generation %} ... {% endgeneration %} encloses
the assistant's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config.errors import DataError
from engine.config.schema import hash_json
from engine.config.settings import DataConfig
from engine.data.conversations import Conversation, Message, Unit, as_transformers_passes, trace
from engine.pretrained.folder import (
    MORE_TEMPLATES_FOLDER,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TokenizerFiles,
    open_tokenizer,
)

CHATML = "chatml"
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_EDGE = 32  # characters by which the end of a message is recognised
_BEGIN, _END = "burst_generation_begin", "burst_generation_end"
_CHATML_SOURCE = r"""
{%- for message in messages -%}
    {%- set content = message['content'] -%}
    {%- set text = content if content is string else content | map(attribute='text') | join -%}
    {{- '<|im_start|>' + message['role'] + '\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- text + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- text + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
Spans = tuple[tuple[int, int], ...]  # characters [first, after) of a text, ascending


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens (bos_token, eos_token, ...) that it may name. name: for errors.

    with_tools: template for rows with tools, if the tokenizer has a separate one.
    """

    name: str
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: ChatTemplate | None = None

    @property
    def content_hash(self) -> str:
        """Hash that is equal for templates that render conversations alike (except the time of day)."""
        own = {"source": self.source, "special_tokens": dict(self.special_tokens)}
        return hash_json(own if self.with_tools is None else {**own, "with_tools": self.with_tools.source})

    def render_chat(self, conversation: Conversation, location: str) -> tuple[str, Spans]:
        """Return the text of `conversation` and the spans of its labels.

        A template with {% generation %} blocks marks the assistant's text itself. Otherwise each turn is found by
        rendering the conversation twice: up to the turn with the generation prompt, and including the turn; the added
        text is the turn. White space after the end marker of a turn is not part of it, since a model stops at the
        marker. Raises DataError, which begins with `location`, if the template leaves out a part of the conversation or
        a turn cannot be located in the text.
        """
        if conversation.tools is not None and self.with_tools is not None:
            return self.with_tools.render_chat(conversation, location)
        self._check_variables(conversation, location)
        if self.name == CHATML:
            self._check_contents(conversation, location)
        text = self.render(conversation, location)
        delimiters = _unused_characters(text, 3)
        traced, units = trace(conversation, delimiters[2])
        try:
            traced_text = self.render(traced, location, delimiters=delimiters[:2])
        except DataError:  # a template may refuse the longer texts
            traced_text = ""
        learned: Spans | None = None
        if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source):
            blocks = self._blocks(conversation, text, delimiters, location)
            if not all(conversation.learned[index] for index in _turns(conversation)):
                traced_blocks = [block.split(delimiters[1])[0] for block in traced_text.split(delimiters[0])[1:]]
                owners = [{units[tag].message for tag in _tags(block, delimiters[2])} for block in traced_blocks]
                blocks = self._learned_blocks(conversation, blocks, owners, location)
            learned = tuple((first, after) for first, after in blocks if first < after)
        if learned != ():
            self._check_nothing_lost(conversation, text, units, {*_tags(traced_text, delimiters[2])}, location)
        if learned is None:  # after the check, whose message is the better one
            learned = self._reply_spans(conversation, text, location)
        if not learned:
            raise self._unusable(location, "renders no text of the assistant. Give the assistant a text")
        return text, learned

    def render(
        self, conversation: Conversation, location: str, *, prompts: bool = False, delimiters: Sequence[str] = ("", "")
    ) -> str:
        """The text of `conversation`; prompts: with the beginning of an answer. delimiters: around generation blocks.

        Raises DataError, which begins with `location`, when the template refuses it or fails.
        """
        given: dict[str, Any] = {
            "messages": [*as_transformers_passes(conversation.messages)],
            "tools": None if conversation.tools is None else [*conversation.tools],
            "documents": None if conversation.documents is None else [*conversation.documents],
            _BEGIN: delimiters[0],
            _END: delimiters[1],
            "add_generation_prompt": prompts,
        }
        template = self._compiled
        try:
            return template.render({**self.special_tokens, **conversation.template_kwargs, **given})
        except Exception as error:  # a template is foreign code that may raise anything
            why = f"cannot render these messages: {_error_text(error)}. Mend the line or the template"
            raise self._unusable(location, why) from None

    def check_syntax(self) -> None:
        """Raise DataError, with file and line, for a template that is not valid Jinja."""
        for template in filter(None, (self, self.with_tools)):
            _ = template._compiled

    def _check_variables(self, conversation: Conversation, location: str) -> None:
        """Raise DataError for template settings that the template does not read or that do not reach it."""
        compiled = self._compiled
        variables = meta.find_undeclared_variables(compiled.environment.parse(self.source))
        for key in conversation.template_kwargs.keys() - variables:
            raise self._unusable(location, f"has no variable {key!r}, which chat_template_kwargs sets. Leave it out")
        lost = conversation.columns & (variables - compiled.environment.globals.keys() - _GIVEN)
        for key in sorted(lost - conversation.template_kwargs.keys()):
            why = f"reads {key!r}, which the row has beside its messages. Write it into chat_template_kwargs of the row"
            raise self._unusable(location, why)

    def _check_contents(self, conversation: Conversation, location: str) -> None:
        """Raise DataError for a message without the content that `chatml` writes, naming its other keys."""
        for index, message in enumerate(conversation.messages):
            if message.get("content") is None:
                keys = ", ".join(key for key, value in message.items() if key != "role" and value)
                why = f"has no form for {keys} of message {index}, which has no content. Use the template of the model"
                raise self._unusable(location, why)

    def _check_nothing_lost(
        self, conversation: Conversation, text: str, units: Sequence[Unit], seen: Set[int], location: str
    ) -> None:
        """Raise DataError for a unit that is not in the traced text and whose removal does not change the text."""
        for number, unit in enumerate(units):
            if number in seen:
                continue
            try:
                is_lost = self.render(unit.removed_from(conversation), location) == text
            except DataError:  # the template requires it, so it reads it
                continue
            if is_lost and self._survives_at_end(conversation, unit, location):
                what = "reasoning" if unit.is_beginning else unit.key
                raise self._unusable(
                    location,
                    f"leaves out {unit}, so it would be lost, but not in a row that ends with that message. Write "
                    f"a row for each answer, in which the answers before it have weight 0 and no {what}",
                )
            if is_lost:
                raise self._unusable(location, f"leaves out {unit}, so it would be lost. Remove it from the row")

    def _survives_at_end(self, conversation: Conversation, unit: Unit, location: str) -> bool:
        """Return whether this part of an assistant's message would be in the text if the conversation ended with it."""
        if unit.message not in _turns(conversation)[:-1]:
            return False
        part = conversation.until(unit.message + 1)
        try:
            return self.render(unit.removed_from(part), location) != self.render(part, location)
        except DataError:  # a template may refuse such a conversation
            return False

    def _blocks(
        self, conversation: Conversation, text: str, delimiters: Sequence[str], location: str
    ) -> list[tuple[int, int]]:
        """Return the characters [first, after) of each generation block, ascending."""
        rendered = self.render(conversation, location, delimiters=delimiters[:2])
        chunks = re.split("([{}{}])".format(*delimiters[:2]), rendered)
        if "".join(chunks[::2]) != text or chunks[1::2] != [*delimiters[:2]] * (len(chunks) // 4):
            raise self._unusable(
                location,
                "changes or nests its generation blocks, so the assistant's text is unknown. Output the blocks as "
                "they are",
            )
        edges = accumulate(map(len, chunks[::2]), initial=0)
        return list(pairwise(edges))[1::2]  # chunks alternate between outside and inside of blocks

    def _learned_blocks(
        self,
        conversation: Conversation,
        blocks: Sequence[tuple[int, int]],
        owners: Sequence[Set[int | None]],
        location: str,
    ) -> list[tuple[int, int]]:
        """Return the generation blocks that are labels; owners: for each the messages whose text it contains."""
        turns, kept = _turns(conversation), []
        for index, block in enumerate(blocks):
            found: Set[int | None] = owners[index] if len(owners) == len(blocks) else set()
            if not found and len(turns) == len(blocks):
                found = {turns[index]}
            learned = {owner is not None and conversation.learned[owner] for owner in found}
            if len(learned) != 1:
                raise self._unusable(
                    location,
                    "does not write a generation block for each message, so which to learn is not known, but some are "
                    "marked as not learned. Write a block for each message",
                )
            kept += [block] * learned.pop()
        return kept

    def _reply_spans(self, conversation: Conversation, text: str, location: str) -> Spans:
        """Return the characters [first, after) of each labelled turn, found by rendering up to it and then with it.

        Templates may render earlier turns differently from the last one: Qwen 3 begins only the last turn with a
        <think> block, even if it is empty.
        """
        spans = []
        for index, message in enumerate(conversation.messages):
            if not conversation.learned[index]:
                continue
            prompt = self.render(conversation.until(index), location, prompts=True)
            with_turn = self.render(conversation.until(index + 1), location)
            first = self._reply_start(conversation, index, text, prompt) if with_turn.startswith(prompt) else None
            content, last_reply = _last_text(message), with_turn[len(prompt) :]
            last_reply = last_reply[: _reply_length(last_reply, content)]
            length = None if first is None else _length_in(text[first:], last_reply, content)
            if first is None or length is None:
                raise self._unusable(
                    location,
                    f"renders earlier messages another way once message {index} is there, so the assistant's text "
                    "cannot be found. Put {% generation %} ... {% endgeneration %} around it in the template",
                )
            if length > 0:
                spans.append((first, first + length))
        return tuple(spans)

    def _reply_start(self, conversation: Conversation, index: int, text: str, prompt: str) -> int | None:
        """Return the character of `text` at which the turn of message `index` begins; None if unknown.

        prompt: the conversation up to the message, with the generation prompt. If `text` does not begin with it,
        because earlier turns are rendered differently or without a part of the generation prompt (<think>), the turn
        begins with its content: after the end of the previous message and (the beginning of) the generation prompt.
        """
        if text.startswith(prompt):
            return len(prompt)
        (mark,) = _unused_characters(text, 1)
        marked = conversation.messages[index] | {"content": mark}
        messages = (*conversation.messages[:index], marked, *conversation.messages[index + 1 :])
        try:
            earlier = self.render(conversation.until(index), "")
            before, has_content, _ = self.render(replace(conversation, messages=messages), "").partition(mark)
        except DataError:  # a template may refuse a content there
            return None
        edge = max(len(earlier) - _EDGE, 0)
        ends = (before.endswith(prompt[edge:end]) for end in range(len(earlier) + 1, len(prompt) + 1))
        is_known = has_content and text.startswith(before) and prompt.startswith(earlier)
        return len(before) if is_known and any(ends) else None

    def _unusable(self, location: str, why: str) -> DataError:
        return DataError(f"{location}: the chat template {self.name} {why}, or give another data.chat_template.")

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # Templates of Hugging Face expect these block rules, filters and functions.
        extensions: list[str | type[Extension]] = [_GenerationBlocks, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.now().strftime  # the local day
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise self._unusable(f"line {error.lineno}", f"is not valid Jinja: {_error_text(error)}. Mend it") from None


class _GenerationBlocks(Extension):
    """{% generation %}: outputs the variables _BEGIN and _END around the block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `value` as JSON: the filter tojson with the options of transformers; that of Jinja escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _unused_characters(text: str, number: int) -> list[str]:
    """Return characters that are not in `text`; Unicode reserves those from U+FDD0 on for internal use."""
    return [*islice((mark for mark in map(chr, count(0xFDD0)) if mark not in text), number)]


def _tags(text: str, tag: str) -> list[int]:
    """Return the numbers of the units whose tags are in `text`."""
    return [int(number) for number in re.findall(f"{tag}(\\d+){tag}", text)]


def _turns(conversation: Conversation) -> list[int]:
    """Return the indexes of the assistant's messages."""
    return [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _last_text(message: Message) -> str:
    """Return the end of the text of a message, as far as it is known."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else content[-1]["text"]


def _error_text(error: Exception) -> str:
    """Return an error's text as one line without a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _reply_length(reply: str, content: str) -> int:
    """Return the length of `reply` without the white space after its end marker, if it has one."""
    stripped = content.strip()  # as some templates render it
    found = reply.find(stripped)
    has_mark = found < 0 or reply[found + len(stripped) :].strip() != ""
    return len(reply.rstrip()) if has_mark else len(reply)


def _length_in(rest: str, last_reply: str, content: str) -> int | None:
    """Return the length of the turn at the start of `rest`; None if `rest` starts with another one.

    last_reply: the same turn rendered as the last of a conversation. The turn in `rest` is either all of it, or a
    suffix that includes the content; only white space may replace the missing beginning.
    """
    if rest.startswith(last_reply):
        return len(last_reply)
    stripped = content.strip()
    blanks = len(rest) - len(rest.lstrip())
    for first in range(len(last_reply) + 1 - max(len(stripped), 1)):
        if rest.startswith(last_reply[first], blanks) and not last_reply[first].isspace():
            ending = last_reply[first:]
            if rest.startswith(ending, blanks) and stripped in ending:
                return blanks + len(ending)
    return None


def find_template(config: DataConfig) -> ChatTemplate:
    """Load the configured template: built in, a file, or that of the tokenizer's folder. Raises DataError."""
    path = config.tokenizer_path
    files = None if path is None else open_tokenizer(path.absolute())
    tokens = {} if files is None else files.special_tokens
    if config.chat_template == CHATML:
        return ChatTemplate(CHATML, _CHATML_SOURCE, tokens)
    if config.chat_template is not None:
        return _template_file(Path(config.chat_template).expanduser().absolute(), tokens)
    if files is not None and (found := folder_template(files)) is not None:
        return found
    sources = {} if files is None else files.chat_templates
    others = f"; it has others: {', '.join(sources)}" if sources else ""
    raise DataError(
        f"data.messages_field needs a chat template, but data.tokenizer={config.tokenizer} has none beside it (looked "
        f"for {TEMPLATE_FILE} and chat_template in {TOKENIZER_CONFIG_FILE}{others}). Set data.chat_template to "
        f"{CHATML} or to a .jinja file, such as one of {MORE_TEMPLATES_FOLDER}."
    )


def folder_template(files: TokenizerFiles) -> ChatTemplate | None:
    """Load the template of a tokenizer's folder, None without a default one. Raises DataError for unreadable files."""
    named = {
        name: ChatTemplate(source.location, source.text, files.special_tokens)
        for name, source in files.chat_templates.items()
    }
    # The name by which transformers, too, finds the template of conversations with tools.
    return replace(named["default"], with_tools=named.get("tool_use")) if "default" in named else None


def _template_file(path: Path, tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(str(path), path.read_text(encoding="utf-8"), tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; expected a chat template.") from None
