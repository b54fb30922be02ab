"""A table of tokenizers and conversations: ids and label masks are those of transformers, at any length.

python tests/proof/engine/data/test_data_chat_table.py [short|long]      prints it
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.tokenizer_families import QWEN3_MARKED
from testkit.tokenizer_kinds import KINDS
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.chat import ChatTemplate
from engine.data.conversations import read_conversation
from engine.data.encoding import encode_documents
from engine.data.sources import Source, split_text
from engine.data.tokenizers import FileTokenizer

_SAID = "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"  # fmt: skip  # noqa: E501
_QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}THINK" + _SAID + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)
_QWEN3 = _QWEN.replace("THINK", "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}")  # fmt: skip  # noqa: E501
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '<|end|>\n\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if documents %}{{ documents | tojson }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<|im_start|>' + role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
_HARMONY = (
    "{{ '<|im_start|>system<|end|>Reasoning: ' + (effort or 'low') + '<|im_end|>' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% generation %}{% if m.thinking %}"
    "{{ '<|end|>analysis ' + m.thinking + '<|im_end|><|im_start|>assistant' }}{% endif %}"
    "{{ '<|end|>final ' + m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + m.role + '<|end|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Žilina"}}}
_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "<weather> & more", "parameters": {}}}


def _talk(question: Any, answer: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


_CODE = "if x:\n        y = 1\n\n  z"
# Name: (template, what the row holds beside its messages, the messages; the long text is put before the last one's).
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "Qwen 2.5, system": (
        _QWEN.replace("THINK", ""),
        {},
        [{"role": "system", "content": "be brief"}, *_talk("code?", _CODE)],
    ),
    "Qwen 2.5, tools": (
        _QWEN.replace("THINK", ""),
        {"tools": [_TOOL]},
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "twelve"},
        ],
    ),
    "Qwen 3, reasoning": (_QWEN3, {}, _talk("why?", "so", reasoning_content="well, let me see")),
    "Qwen 3, turns found": (
        QWEN3_MARKED,
        {"tools": [_TOOL]},
        [
            *_talk("weather?", "", tool_calls=[_CALL]),
            {"role": "tool", "content": "12"},
            *_talk("and?", _CODE),
            *_talk("thanks", "  12 "),
        ],
    ),
    "Llama 3": (_LLAMA3, {}, [*_talk(" hello ", " hi 😀 "), *_talk("and", "  more\n")]),
    "Mistral, documents": (_MISTRAL, {"documents": [{"title": "a", "text": "b é"}]}, _talk("x", "y  ")),
    "Gemma 3, parts": (_GEMMA, {}, _talk([{"type": "text", "text": "part one"}], "1234 aaaa")),
    "harmony": (_HARMONY, {"chat_template_kwargs": {"effort": "high"}}, _talk("a?", "b", thinking="c d")),
    "empty": (_QWEN.replace("THINK", ""), {}, [*_talk("", ""), *_talk("e\u0301 \r\n", "größe")]),
}
_LONG = "".join(f"  line {n}: größe 漢字 {n * n} aaaaaa\r\n\tx = {n % 7}\n" for n in range(70_000))  # 3 MiB


@cache
def tokenizer_text(kind: str) -> str:
    """A tokenizer.json; trained once, as training is not the same each time for some."""
    return KINDS[kind]().to_str()


def learned_by_character(theirs: PreTrainedTokenizerFast, messages: list[Any], **given: Any) -> np.ndarray:
    """The assistant's mask, bool [tokens]: every token with a character of a generation block of transformers."""
    (text,), (blocks,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **given)
    encoded = theirs.backend_tokenizer.encode(text, add_special_tokens=False)
    begins, ends = np.array(encoded.offsets).T
    return np.any([(begins < after) & (first < ends) for first, after in blocks], axis=0)


def compare(kind: str, name: str, long_text: str) -> tuple[int, int]:
    """(tokens, labels) of a conversation; raises AssertionError where they are not those of transformers."""
    source, row, messages = CONVERSATIONS[name]
    messages = [*messages[:-1], messages[-1] | {"content": long_text + messages[-1]["content"]}]
    tokens = {"bos_token": "<|bos|>", "eos_token": "</s>"}
    place = Path("row")
    conversation = read_conversation(row, messages, str(place))
    ours = re.sub(r"{% (end)?generation %}", "", source) if name.endswith("turns found") else source
    text, learned = ChatTemplate(name, ours, tokens).render_chat(conversation, str(place))
    chunks = Source("one row", (place,), lambda _: iter([split_text(text, learned)])).chunks(None)
    parts = list(encode_documents(chunks, FileTokenizer(Tokenizer.from_str(tokenizer_text(kind)), kind), is_chat=True))
    ids, prompts = (np.concatenate([getattr(part, key) for part in parts]) for key in ("ids", "is_prompt"))

    inner = Tokenizer.from_str(tokenizer_text(kind))
    inner.post_processor = None  # transformers loses labels to trim_offsets
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)
    given = {key: value for key, value in row.items() if key != "chat_template_kwargs"}
    kwargs = row.get("chat_template_kwargs", {})
    expected = theirs.apply_chat_template(
        messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True,
        **given, **kwargs,
    )  # fmt: skip
    assert ids.tolist() == expected["input_ids"]
    masks = np.array(expected["assistant_masks"], dtype=bool)
    if kind == "word chunk":  # blanks have no token there: transformers loses a block that begins with one
        masks = learned_by_character(theirs, messages, chat_template=source, **given, **tokens, **kwargs)
    differ = np.flatnonzero(~prompts != masks)
    assert not differ.size, f"labels differ at tokens {differ[:10]}: {theirs.convert_ids_to_tokens(ids[differ[:10]])}"
    return ids.size, int((~prompts).sum())


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_short_conversations_are_those_of_transformers(kind: str, name: str) -> None:
    compare(kind, name, "")


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_long_conversations_are_those_of_transformers(kind: str, name: str) -> None:
    compare(kind, name, _LONG)


if __name__ == "__main__":
    chosen = _LONG if sys.argv[1:] == ["long"] else ""
    print("| tokenizer | " + " | ".join(CONVERSATIONS) + " |\n|---|" + "---|" * len(CONVERSATIONS))
    for kind in KINDS:
        cells = ["{:,} / {:,}".format(*compare(kind, name, chosen)) for name in CONVERSATIONS]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
