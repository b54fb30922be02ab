"""Text <-> token ids: the bytes themselves, a BPE trained on the corpus, or any tokenizer.json.

Each knows how many bytes of text every token id stands for, so a loss per token can be told as bits per byte, the one
unit in which models with different tokenizers can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config.errors import DataError
from engine.runs.files import require_json_object

Ids = npt.NDArray[np.int64]

BPE_EOD_TOKEN = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_FILES = ("special_tokens_map.json", TOKENIZER_CONFIG_FILE)  # the later one wins
_EOD_TOKENS = (BPE_EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class ByteTokenizer:
    """The UTF-8 bytes are the ids; 255, a byte that UTF-8 never uses, ends a document. vocab_size is 256.

    Of this and `FileTokenizer` ids lie in [0, vocab_size), and `eod_id` ends every document.
    """

    name = "bytes"
    vocab_size = 256
    eod_id = 255

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, one per UTF-8 byte."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
        """Ids of each text and the characters [first, after) they stand for; there are no special tokens."""
        encoded = self.encode(texts)
        characters = [np.cumsum((ids & 0xC0) != 0x80) for ids in encoded]  # what no continuation byte is, begins one
        return [(ids, np.stack((after - 1, after), axis=1)) for ids, after in zip(encoded, characters, strict=True)]

    def template_start(self) -> tuple[int, ...]:
        """Nothing is put before a text."""
        return ()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; a character cut in half becomes U+FFFD."""
        return bytes(token for token in ids if token != self.eod_id).decode("utf-8", errors="replace")

    def token_bytes(self) -> Ids:
        """Bytes of text per token id, int64 [vocab_size]: one, and none for the end of a document."""
        return np.where(np.arange(self.vocab_size) == self.eod_id, 0, 1)

    def save(self, folder: Path) -> None:
        """Nothing: there is nothing to remember."""


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from a tokenizer.json or just trained.

    Truncation, padding and added start or end tokens that the file may ask for are switched off: they would change the
    text. Special tokens are found only by their ids, never in the text of a document (but in that of a conversation).
    """

    def __init__(self, inner: Any, name: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self._vocab: dict[Any, int] = inner.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        found = [self._vocab[token] for token in _EOD_TOKENS if token in self._vocab]
        if not found:
            raise DataError(
                f"tokenizer {name} has no end-of-document token (looked for {', '.join(_EOD_TOKENS)}). "
                "Add one of them to its added_tokens with 'special': true."
            )
        self.eod_id = found[0]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, computed on all cores."""
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.int64) for item in encoded]

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
        """Ids of each text and the characters [first, after) they stand for, computed on all cores."""
        self._inner.encode_special_tokens = False
        try:
            encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [(np.array(item.ids, np.int64), np.array(item.offsets, np.int64).reshape(-1, 2)) for item in encoded]

    def template_start(self) -> tuple[int, ...]:
        """What the file's own template puts before every text, as transformers has it: often one id, or none.

        What it puts after a text is left out: `eod_id` ends every document.
        """
        encoded = self._inner.encode("a", add_special_tokens=True)
        added = [*encoded.special_tokens_mask, 0].index(0)
        return tuple(encoded.ids[:added])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=True))

    def token_bytes(self) -> Ids:
        """Bytes of text per token id, int64 [vocab_size]; none for ids that stand for no text.

        Over a document they add up to the length of its UTF-8 text: exactly for tokenizers that work on bytes, closely
        for those that normalise text or add spaces.
        """
        special = {index for index, token in self._inner.get_added_tokens_decoder().items() if token.special}
        tokens = {index: token for token, index in self._vocab.items() if index not in {*special, self.eod_id}}
        decoder = json.dumps(json.loads(self._inner.to_str()).get("decoder"))
        if '"ByteLevel"' in decoder:  # which writes each byte as one character of its alphabet
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
        return np.array([sizes.get(index, 0) for index in range(self.vocab_size)], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json."""
        (folder / TOKENIZER_FILE).write_text(self._inner.to_str(), encoding="utf-8")

    def tokens_for_export(self, beside: Path | None) -> tuple[dict[str, str], dict[str, Any]]:
        """What begins and ends a text, for transformers: ({"bos_token": ..., ...}, {"bos_token_id": ..., ...}).

        beside: the original folder of the file, whose other files say it where they are. Else the end is the token that
        ends documents in training, and the beginning what the tokenizer itself puts before a text, if it does. An id
        that is not known is null. Several may end a text: that of documents in training, and that of a turn in
        conversations.
        """
        texts = {"eos_token": str(self._inner.id_to_token(self.eod_id))}
        if first := self.template_start():
            texts["bos_token"] = str(self._inner.id_to_token(first[0]))
        texts |= {} if beside is None else special_tokens(beside)
        turn = self._vocab.get(texts["eos_token"])
        eos_ids = self.eod_id if turn in (None, self.eod_id) else [self.eod_id, turn]
        return texts, {"bos_token_id": self._vocab.get(texts.get("bos_token")), "eos_token_id": eos_ids}


Tokenizer = ByteTokenizer | FileTokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE of at most `vocab_size` ids trained on `texts`; the same texts give the same tokenizer.

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


def load_tokenizer_file(path: Path, name: str | None = None) -> FileTokenizer:
    """The tokenizer in the tokenizer.json at `path`; `name` (default: the path) appears in manifests and errors."""
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise DataError(
            f"tokenizer {path} cannot be loaded ({error}). Expected 'bytes', 'bpe' or a tokenizer.json of the library "
            "tokenizers as data.tokenizer."
        ) from None
    return FileTokenizer(inner, name or str(path))


def special_tokens(folder: Path) -> dict[str, str]:
    """Name -> text of the special tokens that the files beside a tokenizer give, such as bos_token."""
    tokens: dict[str, str] = {}
    for path in (folder / name for name in _FILES):
        settings = require_json_object(path, "the settings of a tokenizer", DataError) if path.is_file() else {}
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens
