"""Conversations: rendered as transformers renders them, and labels only where the assistant speaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.corpora import record_corpus
from testkit.data_helpers import quick
from testkit.tokenizer_families import (
    CHATML,
    CHATML_MARKED,
    LLAMA3,
    LLAMA3_MARKED,
    QWEN3,
    QWEN3_MARKED,
    write_tokenizer,
)
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.chat import ChatTemplate, find_template
from engine.data.conversations import Conversation, read_conversation
from engine.data.encoding import encode_documents
from engine.data.prepare import prepare
from engine.data.sampler import IGNORE_INDEX, sequential_batches
from engine.data.sources import TextChunk
from engine.data.tokenizers import load_tokenizer_file

Messages = list[dict[str, Any]]


def talk(*turns: str) -> Messages:
    """Messages from "user: hello", "assistant: hi", ..."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


CONVERSATIONS = [
    talk("user: hello", "assistant: hello there"),
    talk(
        "system: say more", "user: what is the sum?", "assistant: 12", "user: please more", "assistant: numbers\n\nno"
    ),
    talk("user: tool?", "assistant: ask the tool", 'tool: {"a": 1}', "assistant:  is 7 — žluťoučký 🐎 "),
    talk("user: a", "assistant: b", "assistant: c", "user: d"),
]


def config_of(tmp_path: Path, conversations: Sequence[object], **settings: Any) -> DataConfig:
    records = [{"messages": messages} for messages in conversations]
    return record_corpus(tmp_path, records, **({"chat_template": "chatml", "messages_field": "messages"} | settings))


def conversation(messages: Messages, **row: Any) -> Conversation:
    return read_conversation(row, messages, "here:1")


def learned_texts(template: ChatTemplate, messages: Messages, **row: Any) -> list[str]:
    text, learned = template.render_chat(conversation(messages, **row), "here:1")
    return [text[first:after] for first, after in learned]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, CHATML_MARKED, LLAMA3_MARKED])
def test_ids_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = write_tokenizer(tmp_path / "model", template)
    inner = Tokenizer.from_file(str(path))  # one that begins texts, but not conversations, with a token
    start = [("<|bos|>", inner.token_to_id("<|bos|>"))]
    inner.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=start)
    inner.save(str(path))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(path.parent))
    found, ours = find_template(DataConfig(tokenizer=str(path), messages_field="messages")), load_tokenizer_file(path)
    marks = {"return_assistant_tokens_mask": template in (CHATML_MARKED, LLAMA3_MARKED)}
    for messages in CONVERSATIONS:
        text, learned = found.render_chat(conversation(messages), "here:1")
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        [encoded] = encode_documents([TextChunk(text, learned)], ours, [7], is_chat=True)
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **marks)
        assert encoded.ids.tolist() == expected["input_ids"]
        if marks["return_assistant_tokens_mask"]:
            assert (~encoded.is_prompt).tolist() == [*map(bool, expected["assistant_masks"])]


@pytest.mark.parametrize(("plain", "marked"), [(CHATML, CHATML_MARKED), (LLAMA3, LLAMA3_MARKED)])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_turns_found_by_rendering_are_those_that_blocks_mark(plain: str, marked: str, messages: Messages) -> None:
    tokens = {"bos_token": "<|bos|>"}
    learned = [
        ChatTemplate("t", source, tokens).render_chat(conversation(messages), "")[1] for source in (plain, marked)
    ]
    assert learned[0] == learned[1]


PARTS = st.lists(
    st.sampled_from(["a", " ", "\n", "|>", "<|im_end|>", "assistant", "\ufdd0", "\ufdd1"]), max_size=6
).map("".join)


@given(contents=st.lists(PARTS, min_size=1, max_size=4))
@quick
def test_labels_are_the_replies_with_end_marker(contents: list[str]) -> None:
    messages = [message for text in contents for message in talk("user: a", f"assistant: {text}")]
    assert learned_texts(ChatTemplate("t", CHATML), messages) == [f"{text}<|im_end|>" for text in contents]
    assert learned_texts(ChatTemplate("t", CHATML_MARKED), messages) == [f"{text}<|im_end|>" for text in contents]


QWEN3_TEMPLATES = [ChatTemplate("t", source) for source in (QWEN3, QWEN3_MARKED)]  # compiled once


@given(contents=st.lists(PARTS, min_size=1, max_size=4))
@quick
def test_turns_of_a_template_that_writes_the_last_one_otherwise_are_those_that_blocks_mark(contents: list[str]) -> None:
    row = conversation([message for text in contents for message in talk("user: a", f"assistant: {text}")])
    plain, marked = (template.render_chat(row, "") for template in QWEN3_TEMPLATES)
    assert plain == marked


def test_bytes_read_chatml_as_plain_text(tmp_path: Path) -> None:
    data = prepare(config_of(tmp_path, CONVERSATIONS * 4, tokenizer="bytes"))
    text, learned = b"", b""
    for shards in (data.train, data.validation):
        [batch] = sequential_batches(shards, shards.token_count - 1, batch_size=1)
        text += bytes(batch.tokens[0].astype(np.uint8))
        learned += bytes(np.where(batch.labels[0] == IGNORE_INDEX, 0, batch.labels[0]).astype(np.uint8))
    assert b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello there<|im_end|>\n" in text
    said = {turn["content"] + "<|im_end|>" for one in CONVERSATIONS for turn in one if turn["role"] == "assistant"}
    assert {part.decode() for part in learned.split(b"\0") if part} == said


def test_a_single_conversation_is_cut_with_its_labels(tmp_path: Path) -> None:
    spoken = talk("user: abc", "assistant: 0123456789", "user: d", "assistant: 9876543210")
    data = prepare(config_of(tmp_path, [spoken], tokenizer="bytes", validation_fraction=0.3))
    learned = b""
    for split in (data.train, data.validation):
        ids = split.read(0, split.token_count)
        learned += bytes(ids[~split.is_prompt(0, split.token_count)].astype(np.uint8))
    assert learned == b"0123456789<|im_end|>9876543210<|im_end|>"


def test_the_template_named_default_is_used(tmp_path: Path) -> None:
    named: Any = [{"name": ["rag"], "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    path = write_tokenizer(tmp_path, named)
    config = DataConfig(tokenizer=str(path), messages_field="messages")
    assert find_template(config).render(Conversation(()), "") == "<|bos|>yes"


def test_a_template_file_overrides_tokenizer_config(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "no")
    config = DataConfig(tokenizer=str(path), messages_field="messages")
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<x>"}, "pad_token": {"content": "P"}}'
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }} file")
    rendered = find_template(config).render(Conversation(()), "")
    assert rendered == "<x>P file", "of transformers special_tokens_map.json wins"


def test_a_missing_template_is_an_error(tmp_path: Path) -> None:
    config = DataConfig(tokenizer=str(write_tokenizer(tmp_path)), messages_field="messages")
    with pytest.raises(DataError, match=r"looked for chat_template\.jinja and chat_template in tokenizer_config\.json"):
        find_template(config)


def test_templates_have_what_those_of_hugging_face_use() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
        "{%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{{ {'text': m.content} | tojson }}{%- endfor -%}"
        "{{ ns.n }} {{ strftime_now('%Y')[:2] }} {{ tools is none }} {{ eos_token is defined }}"
    )
    rendered = ChatTemplate("t", source).render(Conversation(tuple(talk("tool: x", "user: <a> & ž"))), "")
    assert rendered == '{"text": "<a> & ž"}1 20 True False'


def test_a_turn_without_a_mark_ends_with_its_white_space() -> None:
    template = ChatTemplate(
        "t",
        "{% for m in messages %}{{ m.role + ': ' + m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    )
    assert learned_texts(template, talk("user: x", "assistant: y")) == ["y\n\n"]


CALL = {"type": "function", "function": {"name": "get_w", "arguments": {"city": "Xanadu"}}}
TOOL = {"type": "function", "function": {"name": "get_w", "description": "weather", "parameters": {"type": "object"}}}
CALLS: Messages = [
    *talk("user: weather?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    *talk("tool: 12", "assistant: twelve"),
]
# Qwen 3.5: the generation prompt, too, opens the reasoning.
QWEN35 = QWEN3.replace(
    "{% if enable_thinking is defined", "{% if enable_thinking is undefined %}{{ '<think>\n' }}{% elif true"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
THREE = talk("user: a", "assistant: b", "user: b", "assistant: <t", "user: a", "assistant: b")
QUESTION = talk("user: more?", "assistant: no")
CALLED = '<tool_call>\n{"name": "get_w", "arguments": {"city": "Xanadu"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("source", "messages", "kwargs", "turns"),
    [
        (QWEN3, THREE, {}, ["b<|im_end|>", "<t<|im_end|>", NO_THOUGHT + "b<|im_end|>"]),
        (QWEN3, THREE, {"enable_thinking": False}, ["b<|im_end|>", "<t<|im_end|>", "b<|im_end|>"]),
        (QWEN35, THREE, {}, ["b<|im_end|>", "<t<|im_end|>", "\n</think>\n\nb<|im_end|>"]),
        (QWEN35, THREE, {"enable_thinking": False}, ["b<|im_end|>", "<t<|im_end|>", "b<|im_end|>"]),
        (
            QWEN3,
            [*THREE[:3], THREE[3] | {"weight": 0}, *talk("user: a", "assistant: \n\nb ")],
            {},
            ["b<|im_end|>", NO_THOUGHT + "b <|im_end|>"],
        ),
        (
            QWEN3,
            [*THREE[:5], THREE[5] | {"thinking": "b"}],
            {},
            ["b<|im_end|>", "<t<|im_end|>", "<think>\nb\n</think>\n\nb<|im_end|>"],
        ),
        (QWEN3, [*talk("user: a", "assistant: "), *QUESTION], {}, ["<|im_end|>", NO_THOUGHT + "no<|im_end|>"]),
        (
            QWEN3,
            [*talk("user: a", "assistant:  \n\n\n\nb"), *QUESTION],
            {},
            [" \n\n\n\nb<|im_end|>", NO_THOUGHT + "no<|im_end|>"],
        ),
        (
            QWEN3,
            [*talk("user: a", "assistant: \n|>"), *QUESTION],
            {"enable_thinking": False},
            ["\n|><|im_end|>", "no<|im_end|>"],
        ),
        (QWEN3, [*CALLS, *QUESTION], {}, [CALLED, "twelve<|im_end|>", NO_THOUGHT + "no<|im_end|>"]),
        (
            QWEN3,
            [CALLS[0], CALLS[1] | {"content": "let me see"}, *CALLS[2:], *QUESTION],
            {},
            ["let me see\n" + CALLED, "twelve<|im_end|>", NO_THOUGHT + "no<|im_end|>"],
        ),
        (
            QWEN3,
            [CALLS[0], CALLS[1] | {"reasoning": "hm"}, *CALLS[2:]],
            {},
            ["<think>\nhm\n</think>\n\n" + CALLED, NO_THOUGHT + "twelve<|im_end|>"],
        ),
        (QWEN35, [*CALLS, *QUESTION], {}, [CALLED, "twelve<|im_end|>", "\n</think>\n\nno<|im_end|>"]),
    ],
)
def test_turns_are_learned_as_they_stand_in_the_whole_text(
    source: str, messages: Messages, kwargs: dict[str, Any], turns: list[str]
) -> None:
    assert learned_texts(ChatTemplate("t", source), messages, chat_template_kwargs=kwargs) == turns


THINKS = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
CHANGED = "{% set said %}{% generation %}x{% endgeneration %}{% endset %}{{ said | length }}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (THINKS, "renders earlier messages another way once message 1 is there.*generation"),
        (
            "{{ raise_exception('roles must alternate.') }}",
            r"cannot render these messages: roles must alternate\. Mend",
        ),
        ("{{ 1 + 'a' }}", "cannot render these messages: unsupported operand"),
        ("{{ messages.append(1) }}", "cannot render these messages: access to attribute 'append'"),
        ("{{ messages.__class__.__mro__ }}", "cannot render these messages: access to attribute"),
        ("{% for %}", "is not valid Jinja: Expected an expression"),
        (CHANGED, "changes or nests its generation blocks"),
        ("{% generation %}{% endgeneration %}", "renders no text of the assistant"),
    ],
)
def test_templates_that_cannot_be_used_are_named(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "mine.jinja").write_text(source)
    config = config_of(tmp_path, CONVERSATIONS, chat_template=str(tmp_path / "mine.jinja"))
    with pytest.raises(DataError, match=rf"(?s)mine\.jinja.*{text}|{text}.*mine\.jinja"):
        prepare(config)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ({"role": "user"}, r"'messages' is {'role': 'user'}; expected a list of messages"),
        ([], r"the assistant has no text in any of the 0 messages"),
        (talk("user: x"), r"the assistant has no text in any of the 1 messages"),
        (["x"], r"message 0 is 'x'"),
        ([{"role": "user"}], r"message 0 is {'role': 'user'}"),
        ([*talk("user: x"), {"role": "assistant", "content": None}], r"message 1 is .*None}; .* a string as content"),
        ([*talk("user: x"), {"role": 3, "content": "y"}], r"message 1 is .*3.*an object with role"),
    ],
)
def test_bad_records_are_located(tmp_path: Path, messages: object, text: str) -> None:
    with pytest.raises(DataError, match=rf"records\.jsonl:2: {text}"):
        prepare(config_of(tmp_path, [CONVERSATIONS[0], messages]))


# Two tool calls at most, reasoning in the last turn alone.
WEAK = CHATML.replace("message['content']", "(message['content'] or message.tool_calls[0].function.name)")


THOUGHT = "<think>\nhm\n</think>\n\n"
# Reasoning is cut off every content, as by DeepSeek V3.1.
CUTS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
CUTS_PARTS = CUTS.replace(
    "message['content']", "(message.content if message.content is string else message.content[0].text)"
)


@pytest.mark.parametrize(
    ("source", "row", "text"),
    [
        (CHATML, {"messages": CONVERSATIONS[0], "tools": [TOOL]}, r"leaves out tools\[0\] of the row"),
        (CHATML, {"messages": CONVERSATIONS[0], "documents": [{"text": "x"}]}, r"leaves out documents\[0\] of the row"),
        (CHATML, {"messages": [CONVERSATIONS[0][0], CALLS[1] | {"content": ""}]}, r"out tool_calls\[0\] of message 1"),
        (WEAK, {"messages": [CALLS[0], {**CALLS[1], "tool_calls": [CALL, CALL]}]}, r"out tool_calls\[1\] of message 1"),
        (
            CHATML,
            {"messages": [*talk("user: x"), {"role": "assistant", "content": "a", "thinking": "b"}]},
            "out thinking",
        ),
        (
            CHATML,
            {"messages": [*talk("user: x"), {"role": "assistant", "content": "a", "mask": True}]},
            "out mask of m",
        ),
        (
            QWEN3,
            {"messages": [*talk("user: x"), {"role": "assistant", "content": "a", "thinking": "b"}, *QUESTION]},
            "out thinking of message 1, .* not in a row that ends .* before it have weight 0 and no thinking, or",
        ),
        (
            QWEN3,
            {"messages": [*talk("user: x", f"assistant: {THOUGHT}a"), *QUESTION]},
            "out the beginning of content of message 1, .* row for each answer, .* weight 0 and no reasoning, or",
        ),
        (CUTS, {"messages": talk("user: x", f"assistant: {THOUGHT}a")}, "out the beginning of content of m.* Remove"),
        (
            CUTS_PARTS,
            {
                "messages": [
                    *talk("user: x"),
                    {"role": "assistant", "content": [{"type": "text", "text": THOUGHT + "a"}]},
                ]
            },
            r"out the beginning of content\[0\] of message 1",
        ),
        (CHATML, {"messages": CONVERSATIONS[0], "chat_template_kwargs": {"day": 1}}, "has no variable 'day'"),
        (CHATML + "{{ day }}", {"messages": CONVERSATIONS[0], "day": "x"}, "reads 'day', which the row has beside"),
        ("chatml", {"messages": CALLS}, "no form for tool_calls of message 1"),
        ("chatml", {"messages": CONVERSATIONS[0], "tools": [TOOL]}, r"leaves out tools\[0\]"),
    ],
)
def test_what_a_template_leaves_out_refuses_the_row_by_name(tmp_path: Path, source: str, row: Any, text: str) -> None:
    (tmp_path / "mine.jinja").write_text(source)
    template = "chatml" if source == "chatml" else str(tmp_path / "mine.jinja")
    with pytest.raises(DataError, match=rf"records\.jsonl:1: .*{text}"):
        prepare(record_corpus(tmp_path, [row], messages_field="messages", chat_template=template))


def test_a_row_for_each_answer_has_its_reasoning() -> None:
    first, last = talk("assistant: a")[0], talk("assistant: b")[0] | {"reasoning_content": "hm"}
    row = [*talk("user: x"), first | {"weight": 0}, *talk("user: y"), last]
    assert learned_texts(ChatTemplate("t", QWEN3), row) == [f"{THOUGHT}b<|im_end|>"]


def test_chatml_joins_the_parts_of_a_content() -> None:
    template = find_template(DataConfig(messages_field="messages", chat_template="chatml"))
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    messages = [*talk("user: x"), {"role": "assistant", "content": parts}]
    assert learned_texts(template, messages) == ["42<|im_end|>"]


def test_rows_with_tools_are_rendered_by_the_template_for_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    sources = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    listed = [{"name": name, "template": text} for name, text in sources.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed, "eos_token": "<|im_end|>"}))
    template = find_template(DataConfig(messages_field="messages", tokenizer=str(tmp_path / "tokenizer.json")))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [TOOL]):
        text, _ = template.render_chat(conversation(CONVERSATIONS[0], tools=tools), "")
        assert text == theirs.apply_chat_template(CONVERSATIONS[0], tools=tools, tokenize=False), tools


@pytest.mark.parametrize("source", ["chatml", CHATML, CHATML_MARKED, LLAMA3, LLAMA3_MARKED])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0.0}, {"loss_mask": 0, "trainable": False}])
def test_messages_marked_as_not_learned_are_read_only(tmp_path: Path, source: str, mark: dict[str, Any]) -> None:
    messages = talk("user: one", "assistant: bad answer", "user: two", "assistant: good answer")
    messages[1] |= mark
    (tmp_path / "mine.jinja").write_text(source)
    name = "chatml" if source == "chatml" else str(tmp_path / "mine.jinja")
    template = find_template(DataConfig(messages_field="messages", chat_template=name))
    end = "<|eot|>" if source in (LLAMA3, LLAMA3_MARKED) else "<|im_end|>"
    assert learned_texts(replace(template, special_tokens={"bos_token": "<|bos|>"}), messages) == [f"good answer{end}"]


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        ({"weight": 0.5}, r"message 1 has weight=0\.5; expected 0 or false .*not implemented"),
        ({"weight": "0"}, "message 1 has weight='0'; expected 0"),
        ({"loss_mask": [1, 0]}, r"message 1 has loss_mask=\[1, 0\]; expected 0"),
        ({"weight": 0, "train": True}, "message 1 has weight=0 and train=True, which contradict each other"),
        ({"weight": 0}, "every message of the assistant is marked as not learned"),
    ],
)
def test_marks_that_cannot_be_honoured_are_named(marks: dict[str, Any], text: str) -> None:
    messages = talk("user: one", "assistant: a")
    messages[1] |= marks
    with pytest.raises(DataError, match=text):
        conversation(messages)


def test_only_the_assistant_can_be_marked_to_be_learned() -> None:
    with pytest.raises(DataError, match="message 0 has the role 'user' and is marked to be learned"):
        conversation([{"role": "user", "content": "x", "train": True}, *talk("assistant: y")])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"tools": "[get_w]"}, r"'tools' is '\[get_w\]'; expected a list of objects"),
        ({"tools": ["get_w"]}, "'tools' is .*; expected a list of objects"),
        ({"documents": {"text": "x"}}, "'documents' is .*; expected a list of objects"),
        ({"chat_template_kwargs": []}, r"'chat_template_kwargs' is \[\]; expected an object"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs sets 'tools'"),
        ({"functions": [TOOL]}, "the row has 'functions', which no template gets. Write it as tools"),
        ({"weight": 0}, "the row is marked as not learned. Leave such lines out"),
    ],
)
def test_rows_that_cannot_be_honoured_are_named(row: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        conversation(CONVERSATIONS[0], **row)


def test_tools_stored_as_json_are_the_tools() -> None:
    assert conversation(CALLS, tools=json.dumps([TOOL])) == conversation(CALLS, tools=[TOOL])


def test_a_changed_template_is_other_data(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML)
    kept = config_of(tmp_path, CONVERSATIONS, chat_template=str(path))
    first = prepare(kept).path
    assert prepare(kept).path == first
    path.write_text(CHATML.replace("im_", "mi_"))
    with pytest.raises(DataError, match="template_hash: made with"):
        prepare(kept)
