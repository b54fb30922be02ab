"""Small tokenizers as families of models have them, and one for conversations with chat templates of their shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = "hello there world, it's 1234 numbers\n\n  and   more\t tabs größe €uro 😀 naïve 漢字 " * 20
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_BYTES = processors.ByteLevel(trim_offsets=False)


def _byte_level(special: list[str], words: str | None = None) -> Tokenizer:
    inner = Tokenizer(models.BPE(ignore_merges=words is not None))
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [] if words is None else [pre_tokenizers.Split(Regex(words), "isolated")]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*split, cut])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    inner.post_processor = _BYTES
    return inner


def _start(inner: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, inner.token_to_id(token))])


def _llama3() -> Tokenizer:
    inner = _byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], _LLAMA3_WORDS)
    inner.post_processor = processors.Sequence([_BYTES, _start(inner, "<|begin_of_text|>")])
    return inner


def _qwen() -> Tokenizer:
    inner = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _LLAMA3_WORDS)
    inner.normalizer = normalizers.NFC()
    return inner


def _mistral() -> Tokenizer:
    chunks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnoprstuvwxy,é"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "t"), ("▁", "▁")]
    vocabulary = {chunk: index for index, chunk in enumerate([*chunks, *map("".join, merges)])}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = _start(inner, "<s>")
    return inner


def _gpt2() -> Tokenizer:
    return _byte_level(["<|endoftext|>"])


# How it is made, what begins a document or None, what ends one, what the file beside it says.
FAMILIES: dict[str, tuple[Callable[[], Tokenizer], str | None, str, dict[str, str]]] = {
    "llama3": (_llama3, "<|begin_of_text|>", "<|end_of_text|>", {"bos_token": "<|begin_of_text|>"}),
    "qwen": (_qwen, None, "<|endoftext|>", {"eos_token": "<|im_end|>"}),
    "mistral": (_mistral, "<s>", "</s>", {"bos_token": "<s>", "unk_token": "<unk>"}),
    "gpt2": (_gpt2, None, "<|endoftext|>", {"bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}),
}


def write_family(folder: Path, name: str) -> Path:
    """tokenizer.json of the family in `folder`, and beside it what transformers reads, too."""
    make, _, end, settings = FAMILIES[name]
    folder.mkdir(parents=True)
    make().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|/head|>", "<|eot|>"]
# ChatML as most models have it: the text of the assistant is not marked.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 3: a header, two line breaks, trimmed content; the first message brings the start token.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|head|>' + message['role']"
    " + '<|/head|>\n\n' + message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Both with generation blocks.
CHATML_MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|head|>' + message['role'] + '<|/head|>\n\n' }}"
    "{%- if message['role'] == 'assistant' -%}{%- generation -%}{{ message['content'] | trim + '<|eot|>' }}"
    "{%- endgeneration -%}{%- else -%}{{ message['content'] | trim + '<|eot|>' }}{%- endif -%}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Qwen 3: only an answer to the last question has its reasoning, and the last message has the tags even without any.
QWEN3_MARKED = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(question=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% set text = m.content or '' %}"
    "{% if m.role == 'assistant' %}{% generation %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.question and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + text.lstrip('\n') }}{% else %}{{ text }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if text or not loop.first }}"
    "{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ text + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QWEN3 = QWEN3_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def write_tokenizer(folder: Path, template: object = None, **settings: object) -> Path:
    """tokenizer.json in `folder`, beside it a tokenizer_config.json with `template` and `settings`."""
    folder.mkdir(parents=True, exist_ok=True)
    _byte_level(SPECIAL).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    chat = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | chat | settings))
    return folder / "tokenizer.json"
