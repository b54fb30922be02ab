"""Tokenizers: bytes, a BPE trained on the corpus, or any tokenizer.json.

Each knows the bytes of text of every token id, so a loss per token can be converted to bits per byte, the one
unit in which models with different tokenizers can be compared.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.pretrained.folder import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenizerFiles, open_tokenizer
from engine.pretrained.resolve import resolve_tokenizer
from engine.runs.files import json_text

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BPE_EOD_TOKEN = "<|endoftext|>"
# Tokens that end a document, tried if no file of the folder names one.
_EOD_TOKENS = (BPE_EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpans(NamedTuple):
    """Tokens of a text with their positions in it.

    ids           int64 [tokens]
    offsets       characters [first, after) that each stands for, int64 [tokens, 2]
    word_starts   of a unigram model, which tokens begin a word of the pre-tokenizer, bool [tokens]; of others None
    """

    ids: Ids
    offsets: Ids
    word_starts: Flags | None = None


class ByteTokenizer:
    """Ids are UTF-8 bytes; 255, which UTF-8 never uses, ends a document. vocab_size is 256.

    Ids of this and of `FileTokenizer` are in [0, vocab_size), and `eod_id` ends every document.
    """

    name = "bytes"
    vocab_size = 256
    eod_id = 255
    is_local = True  # ids of a text are those of its parts, wherever it is split

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, one per UTF-8 byte."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str], *, finds_special: bool) -> list[TokenSpans]:
        """Return the ids of each text with their characters [first, after); there are no special tokens."""
        encoded = self.encode(texts)
        characters = [
            np.cumsum((ids & 0xC0) != 0x80) for ids in encoded
        ]  # every other than a continuation byte starts one
        return [
            TokenSpans(ids, np.stack((after - 1, after), axis=1))
            for ids, after in zip(encoded, characters, strict=True)
        ]

    def template_start(self) -> tuple[int, ...]:
        """Return no ids: nothing precedes a text."""
        return ()

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode `ids`; incomplete characters become U+FFFD, the end of a document `BPE_EOD_TOKEN` or nothing."""
        end = "" if skip_special else BPE_EOD_TOKEN
        documents = bytes(int(token) for token in ids).split(bytes([self.eod_id]))
        return end.join(document.decode("utf-8", errors="replace") for document in documents)

    def token_bytes(self) -> Ids:
        """Return the bytes of text per token id, [vocab_size] int64: 1, and 0 for the end of a document."""
        return np.where(np.arange(self.vocab_size) == self.eod_id, 0, 1)

    def save(self, folder: Path) -> None:
        """Write nothing: there is no state."""


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from a tokenizer.json or trained.

    Truncation, padding and added start or end tokens that the file may configure are disabled: they would change the
    text. Special tokens are found only by their ids, never in the text of a document (but in that of a conversation).
    """

    is_local = False

    def __init__(
        self,
        inner: Any,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        stated_ends: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """special_tokens: name -> text; stated_ends: file of the folder -> ids that end a text."""
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        # Without special tokens it changes no ids, but offsets: trim_offsets removes blanks from them.
        self._post_processor = inner.post_processor
        inner.post_processor = None
        self._inner = inner
        self._vocab: dict[Any, int] = inner.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        self.special_tokens = dict(special_tokens or {})
        self.eod_id = self._find_end(stated_ends or {})

    @property
    def inner(self) -> Any:
        """The tokenizer of the library tokenizers."""
        return self._inner

    def _find_end(self, stated: Mapping[str, Sequence[int]]) -> int:
        """Return the id that ends a document: the eos_token, else one stated in the folder, else a known name.

        Raises DataError when the files of the folder contradict one another, or nothing is found.
        """
        token, ids = self.special_tokens.get("eos_token"), [index for found in stated.values() for index in found]
        if token in self._vocab:
            end = self._vocab[token]
            if ids and end not in ids:
                said = " and ".join(f"{name} has eos_token_id {list(found)}" for name, found in stated.items())
                raise DataError(
                    f"tokenizer {self.name}: its eos_token {token!r} is id {end}, but {said}, so it is not known what "
                    "ends a text. Correct eos_token in tokenizer_config.json or eos_token_id in the others."
                )
            return end
        known = [self._vocab[name] for name in _EOD_TOKENS if name in self._vocab]
        held = {*self._vocab.values()}
        choice = [index for index in known if index in ids] or [index for index in ids if index in held] or known
        if not choice:
            raise DataError(
                f"tokenizer {self.name} has no end-of-document token (looked for eos_token in {TOKENIZER_CONFIG_FILE} "
                f"beside it and for {', '.join(_EOD_TOKENS)}). Name one of its tokens there as eos_token."
            )
        return choice[0]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, computed on all cores."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.int64) for item in encoded]

    def encode_with_offsets(self, texts: Sequence[str], *, finds_special: bool) -> list[TokenSpans]:
        """Return the ids of each text with their characters [first, after), computed on all cores.

        finds_special: whether the text of special tokens is encoded as these, as in conversations, or as plain text.
        """
        if finds_special or not self._is_lossless:
            return self._encode_with_offsets(texts, finds_special=finds_special)
        # The library is twice as slow with offsets; for byte-level tokens they are a cumulative sum.
        found = [self._placed(text, ids) for text, ids in zip(texts, self.encode(texts), strict=True)]
        missing = [text for text, item in zip(texts, found, strict=True) if item is None]
        rest = iter(self._encode_with_offsets(missing, finds_special=False))
        return [next(rest) if item is None else item for item in found]

    @cached_property
    def _is_lossless(self) -> bool:
        """Return whether tokens are bytes of the text (possibly without blanks): byte-level, nothing added."""
        parts = json.loads(self._inner.to_str())
        decoder, splitter = (json.dumps(parts.get(key)) for key in ("decoder", "pre_tokenizer"))
        return '"ByteLevel"' in decoder and '"add_prefix_space": true' not in splitter

    @cached_property
    def _text_bytes(self) -> Ids:
        return self.token_bytes()

    def _placed(self, text: str, ids: Ids) -> TokenSpans | None:
        """Return `ids` of `text` with their characters, from the tokens' bytes; None if those are not its bytes."""
        normalizer = self._inner.normalizer
        if normalizer is not None and normalizer.normalize_str(text) != text:
            return None
        data, ends = np.frombuffer(text.encode(), dtype=np.uint8), np.cumsum(self._text_bytes[ids])
        if not ids.size or ends[-1] != data.size:
            return None
        characters = np.cumsum((data & 0xC0) != 0x80)  # every other than a continuation byte starts one
        begins = ends - self._text_bytes[ids]
        return TokenSpans(ids, np.stack((characters[begins] - 1, characters[ends - 1]), axis=1))

    def _encode_with_offsets(self, texts: Sequence[str], *, finds_special: bool) -> list[TokenSpans]:
        """Encode as `encode_with_offsets`, with the offsets of the library."""
        self._inner.encode_special_tokens = not finds_special
        try:
            encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [
            TokenSpans(
                np.array(item.ids, np.int64),
                np.array(item.offsets, np.int64).reshape(-1, 2),
                self._word_starts(item) if self._is_unigram else None,
            )
            for item in encoded
        ]

    @cached_property
    def _is_unigram(self) -> bool:
        return bool(json.loads(self._inner.to_str())["model"].get("type") == "Unigram")

    @staticmethod
    def _word_starts(encoding: Any) -> Flags:
        words = encoding.word_ids
        return np.array([n == 0 or word != words[n - 1] for n, word in enumerate(words)], dtype=np.bool_)

    def template_start(self) -> tuple[int, ...]:
        """Return the ids that the file's template puts before every text, as in transformers: often one, or none.

        Ids that it puts after a text are left out: `eod_id` ends every document.
        """
        with self._post_processed():
            encoded = self._inner.encode("a", add_special_tokens=True)
        added = [*encoded.special_tokens_mask, 0].index(0)
        return tuple(encoded.ids[:added])

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode `ids`, with or without special tokens."""
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=skip_special))

    def token_bytes(self) -> Ids:
        """Return the bytes of text per token id, [vocab_size] int64; 0 for ids without text.

        Over a document they add up to the length of its UTF-8 text: exactly for tokenizers that work on bytes, closely
        for those that normalise text, add spaces, or have added tokens that swallow blanks (`TokenShards.byte_ratio`).
        """
        added = self._inner.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special}
        tokens = {index: token for token, index in self._vocab.items() if index not in {*special, self.eod_id}}
        decoder = json.dumps(json.loads(self._inner.to_str()).get("decoder"))
        if '"ByteLevel"' in decoder:  # writes each byte as one character of its alphabet
            from tokenizers import pre_tokenizers

            alphabet = set(pre_tokenizers.ByteLevel.alphabet())
            sizes = {index: len(text if alphabet.issuperset(text) else text.encode()) for index, text in tokens.items()}
        else:
            # A token at the start of a text loses its leading space in most decoders: decode it after another one.
            [before] = self.encode(["a"])
            prefix = self._inner.decode(before.tolist(), skip_special_tokens=False)
            texts = self._inner.decode_batch([[*before.tolist(), index] for index in tokens], skip_special_tokens=False)
            lengths = (len(text[len(prefix) :].encode("utf-8", "replace")) for text in texts)
            sizes = dict(zip(tokens, lengths, strict=True))
            if '"ByteFallback"' in decoder:
                sizes |= {index: 1 for index, token in tokens.items() if _BYTE_TOKEN.fullmatch(token)}
        # An added token is literal text, whatever the alphabet of the others.
        sizes |= {index: len(token.content.encode()) for index, token in added.items() if index in tokens}
        return np.array([sizes.get(index, 0) for index in range(self.vocab_size)], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and, with special tokens, tokenizer_config.json: a folder that reads back the same."""
        with self._post_processed():
            (folder / TOKENIZER_FILE).write_text(self._inner.to_str(), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.named_tokens()}
        (folder / TOKENIZER_CONFIG_FILE).write_text(json_text(settings))

    @contextlib.contextmanager
    def _post_processed(self) -> Iterator[None]:
        """Return the tokenizer with the post-processor of its file."""
        self._inner.post_processor = self._post_processor
        try:
            yield
        finally:
            self._inner.post_processor = None

    def named_tokens(self) -> dict[str, str]:
        """Return special tokens by name, including those that end a document and begin every text."""
        found = {"eos_token": str(self._inner.id_to_token(self.eod_id))}
        if first := self.template_start():
            found["bos_token"] = str(self._inner.id_to_token(first[0]))
        return found | self.special_tokens

    def named_id(self, name: str) -> int | None:
        """Return the id of a special token by name, such as bos_token."""
        return self._vocab.get(self.named_tokens().get(name))


Tokenizer = ByteTokenizer | FileTokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Train a byte-level BPE of at most `vocab_size` ids on `texts`; deterministic.

    Id 0 is the end of a document, then come the 256 bytes, so every text can be encoded. A small corpus may not have
    enough repeated pairs and gives fewer ids. `vocab_size` is at least 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BPE_EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return FileTokenizer(inner, "bpe")


def load_tokenizer_file(path: Path, name: str | None = None, *, verify: bool = False) -> FileTokenizer:
    """Load the tokenizer of a folder, or of a tokenizer.json and the files next to it.

    Args:
        path: the folder, or the file in it.
        name: appears in manifests and errors; default: the path.
        verify: compare with transformers where it is installed (`engine.pretrained.resolve`).

    Raises DataError when it cannot be loaded, or the files of its folder contradict one another.
    """
    return tokenizer_of(open_tokenizer(path), name or str(path), verify=verify)


def tokenizer_of(files: TokenizerFiles, name: str, *, verify: bool = False) -> FileTokenizer:
    """Build the tokenizer that these files describe. Raises as `load_tokenizer_file`."""
    found = resolve_tokenizer(files, verify=verify)
    return FileTokenizer(found.inner, name, found.special_tokens, files.stated_ends)
