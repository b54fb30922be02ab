"""Small tokenizers, one of each kind of pipeline that families of models have, with chat marks as special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|end|>", "</s>", "<unk>"]
_TEXT = (
    "hello there world, it's 1234 numbers and 1,000 more\n\n  and\tmore tabs: def f(x):\n    return x + 1\n größe €uro "
    "naïve 漢字 please say what the weather is like today {\"name\": \"get_weather\", \"arguments\": {}} aaaa aaaaaaaa "
) * 30  # fmt: skip
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _added(inner: Tokenizer) -> Tokenizer:
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens([AddedToken("<tool>", normalized=False, lstrip=True, rstrip=True)])
    return inner


def _start(inner: Tokenizer, token: str) -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, inner.token_to_id(token))])


def _byte_level(words: Sequence[str] = (), *, trims: bool = False, prefix: bool = False) -> Tokenizer:
    inner = Tokenizer(models.BPE(ignore_merges=bool(words)))
    steps = [pre_tokenizers.Split(Regex(word), "isolated") for word in words]
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not words)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([_TEXT], trainer)
    inner.post_processor = processors.ByteLevel(trim_offsets=trims)
    return _added(inner)


def _qwen() -> Tokenizer:
    inner = _byte_level([_QWEN])
    inner.normalizer = normalizers.NFC()
    return inner


def _llama3() -> Tokenizer:
    inner = _byte_level([_LLAMA3])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), _start(inner, "<|bos|>")])
    return inner


def _fallback(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """A BPE over characters with bytes for those it does not know, as sentencepiece makes them."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    text = "▁" + _TEXT.replace(" ", "▁").replace("漢字", "")
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=[^▁])(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *_BYTES], show_progress=False)
    inner.train_from_iterator([text], trainer)
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizer or pre_tokenizers.Split("no such text", "isolated")
    strip = decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    inner.post_processor = _start(inner, "<|bos|>")
    return _added(inner)


def _unigram(normalizer: Any) -> Tokenizer:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([_TEXT], trainer)
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return _added(inner)


def _word_piece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    inner.train_from_iterator([_TEXT], trainer)
    inner.decoder = decoders.WordPiece()
    return _added(inner)


def _metaspace(scheme: Any) -> Tokenizer:
    return _fallback(None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


_LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _byte_level,
    "gpt2 that trims offsets": partial(_byte_level, trims=True),
    "qwen": _qwen,
    "llama 3": _llama3,
    "o200k": partial(_byte_level, [_O200K]),
    "deepseek": partial(_byte_level, [r"\p{N}{1,3}", "[一-龥]+", _LLAMA3]),
    "llama 2": partial(_fallback, _LLAMA2, None),
    "mistral": partial(_metaspace, "first"),
    "metaspace always": partial(_metaspace, "always"),
    "gemma": partial(_fallback, normalizers.Replace(" ", "▁"), None),
    "unigram": partial(_unigram, normalizers.NFKC()),
    "word chunk": _word_piece,
}
