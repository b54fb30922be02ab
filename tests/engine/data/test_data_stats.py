"""The byte-unigram yardstick against a count by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from engine.config import DataConfig
from engine.data import PreparedData, prepare, unigram_bits_per_byte

TEXTS = ["aaab", "abab", "b€", "aaaa aaaa", "bbb", "ab ba"]


def prepare_texts(folder: Path, tokenizer: str) -> PreparedData:
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_text(text)
    paths = (str(folder / "*.txt"),)
    config = DataConfig(format="text", paths=paths, tokenizer=tokenizer, bpe_vocab_size=262, validation_fraction=0.3)
    return prepare(config)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_unigram_bits_per_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    prepared = prepare_texts(tmp_path, tokenizer)
    decode = prepared.load_tokenizer().decode
    train, validation = (
        decode(shards.read(0, shards.token_count)).encode() for shards in (prepared.train, prepared.validation)
    )
    counts = Counter(train)
    bits = [-math.log2((counts[byte] + 1) / (len(train) + 256)) for byte in validation]
    assert unigram_bits_per_byte(prepared) == pytest.approx(sum(bits) / len(bits), rel=1e-12)


def test_the_yardstick_of_real_text_is_between_four_and_five_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path))
    assert 4 < unigram_bits_per_byte(prepare(DataConfig(max_bytes=500_000))) < 5.2
