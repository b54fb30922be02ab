"""Chat templates as Hugging Face writes them: Jinja programs that turn messages into one text.

A template is somebody else's program, so it runs in Jinja's sandbox, which lets it neither change what it is given nor
reach into Python. {% generation %} ... {% endgeneration %} encloses what the assistant says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import DataConfig
from engine.data.files import hash_json, read_json_object, reading_error
from engine.errors import DataError

CHATML = "chatml"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILES = ("special_tokens_map.json", TOKENIZER_CONFIG_FILE)  # the later one wins
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
    special_tokens = {} if folder is None else special_tokens_of(folder)
    if config.chat_template == CHATML:
        return ChatTemplate(CHATML, _CHATML_SOURCE, special_tokens)
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser().absolute()
        return ChatTemplate(str(path), _read_template(path), special_tokens)
    if folder is not None:
        path = folder / TEMPLATE_FILE
        if path.is_file():
            return ChatTemplate(str(path), _read_template(path), special_tokens)
        source = _configured_template(folder)
        if source is not None:
            return ChatTemplate(str(folder / TOKENIZER_CONFIG_FILE), source, special_tokens)
    raise DataError(
        f"data.messages_field needs a chat template, but data.tokenizer={config.tokenizer} has none beside it (looked "
        f"for {TEMPLATE_FILE} and chat_template in {TOKENIZER_CONFIG_FILE}). Set data.chat_template to {CHATML} or to "
        "a .jinja file."
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise reading_error(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"the chat template {path}: invalid UTF-8 at byte offset {error.start}; expected Jinja."
        ) from None


def _configured_template(folder: Path) -> str | None:
    """chat_template of tokenizer_config.json: a text, or a list of named ones, of which "default" is meant."""
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return None
    found = read_json_object(path, "the settings of a tokenizer").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_tokens_of(folder: Path) -> dict[str, str]:
    """Name -> text of the special tokens that the files beside a tokenizer give, such as bos_token."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS_FILES:
        path = folder / name
        if not path.is_file():
            continue
        for key, value in read_json_object(path, "the settings of a tokenizer").items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


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
