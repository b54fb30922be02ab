"""Tokenizers: ids and text are the same thing, and every byte of text is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_helpers import quick
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_families import FAMILIES
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from engine.config.errors import DataError
from engine.data.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer_file,
    train_bpe,
)

CORPUS = ["def encode(self, text):\n    return text.encode()\n" * 20, "größe €uro 😀 naïve\n" * 10]
BPE = train_bpe(CORPUS, 320)
EXACT: list[Any] = [ByteTokenizer(), BPE]
TOKEN_BYTES = {tokenizer.name: tokenizer.token_bytes() for tokenizer in EXACT}
any_text = st.text(st.characters(codec="utf-8"), max_size=200)


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda tokenizer: tokenizer.name)
@given(text=any_text)
@quick
def test_text_survives_and_bytes_add_up(tokenizer: Any, text: str) -> None:
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text
    assert TOKEN_BYTES[tokenizer.name][tokenizer.eod_id] == 0
    assert TOKEN_BYTES[tokenizer.name][ids].sum() == len(text.encode())
    assert tokenizer.eod_id not in ids
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def test_bpe_of_a_tiny_corpus_still_knows_every_byte() -> None:
    tokenizer = train_bpe(["ab"], 5000)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(*tokenizer.encode(["\x00ÿ€"])) == "\x00ÿ€"


def test_bpe_is_the_same_each_time_and_read_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_bpe(CORPUS, 320).save(tmp_path / name)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    again = load_tokenizer_file(tmp_path / "a" / "tokenizer.json", "bpe")
    assert (again.name, again.vocab_size) == ("bpe", BPE.vocab_size)
    assert again.encode(CORPUS)[0].tolist() == BPE.encode(CORPUS)[0].tolist()
    assert BPE.vocab_size <= 320
    assert BPE.encode(CORPUS)[0].size < len(CORPUS[0]) / 2


def test_byte_fallback_and_spaces_are_counted() -> None:
    tokenizer = FileTokenizer(FAMILIES["mistral"][0](), "mistral")
    text = " hello a é€a a"  # with the space that a text begins with there
    [ids] = tokenizer.encode([text])
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes()[tokenizer.eod_id] == 0


def make_word_level(**tokens: int) -> Tokenizer:
    inner = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2, **tokens}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


def test_word_tokens_count_the_space_before_them_and_ids_may_have_gaps() -> None:
    tokenizer = FileTokenizer(make_word_level(**{"</s>": 10}), "words")
    assert tokenizer.token_bytes()[[0, 1, 7, tokenizer.eod_id]].tolist() == [6, 6, 0, 0]
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,) == (11,)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    inner = make_word_level(**{"</s>": 3})
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode(["hello world hello world"])[0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"tokenizer .*bad\.json cannot be loaded .*Expected 'bytes', 'bpe' or a tokenizer\.json"),
        (b"not json", r"tokenizer .*bad\.json cannot be loaded \("),
        (b"{}", r"bad\.json cannot be loaded"),
        (b"\xff\xfe", r"bad\.json cannot be loaded"),
        (make_word_level().to_str().encode(), r"bad\.json has no end-of-document token \(looked for <\|endoftext"),
    ],
)
def test_unusable_tokenizer_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer_file(tmp_path / "bad.json")
