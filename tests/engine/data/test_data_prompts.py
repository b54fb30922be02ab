"""Prompts are read and not learned: no token of them is a label, wherever samples are cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_helpers import packed
from testkit.corpora import record_corpus

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.prepare import prepare
from engine.data.sampler import IGNORE_INDEX, sequential_batches
from engine.data.shards import TokenShards, open_token_set

PAIRS = [(f"question {index}? ", f"answer {index * 7}.") for index in range(60)] + [
    ("", "no prompt"),
    ("no answer", ""),
]


def corpus(tmp_path: Path, pairs: list[tuple[str, str]] = PAIRS) -> DataConfig:
    records = [{"ask": ask, "say": say} for ask, say in pairs]
    return record_corpus(tmp_path, records, text_field="say", prompt_field="ask")


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    return prepare(corpus(tmp_path)).train


def test_exactly_the_answers_are_learned(shards: TokenShards) -> None:
    whole = shards.read(0, shards.token_count)
    mask = shards.is_prompt(0, shards.token_count)
    texts = "".join("|" if token == shards.eod_id else chr(token) for token in whole[~mask]).split("|")[:-1]
    asked = "".join(chr(token) for token in whole[mask])
    expected = {say: ask for ask, say in PAIRS}
    assert len(texts) > 40
    assert asked == "".join(expected[text] for text in texts)
    head, tail = shards.split_tail(0.3)  # windows know their prompts, too
    joined = np.concatenate([head.is_prompt(0, head.token_count), tail.is_prompt(0, tail.token_count)])
    assert (joined == mask).all()


@pytest.mark.parametrize("seq_len", [5, 64])
def test_samples_label_the_same_tokens_wherever_they_are_cut(shards: TokenShards, seq_len: int) -> None:
    batches = list(sequential_batches(shards, seq_len, batch_size=3))
    labels = np.concatenate([batch.labels.ravel() for batch in batches])[: shards.token_count - 1]
    expected = shards.read(1, shards.token_count - 1)
    expected[shards.is_prompt(1, shards.token_count - 1)] = IGNORE_INDEX
    assert (labels == expected).all()
    batch = packed(shards, seq_len, 0).batch(0, 0, 0, 1, 4)
    shifted = np.where(batch.labels == IGNORE_INDEX, -1, batch.labels)[:, :-1]
    assert (shifted == -1).any()
    assert ((shifted == -1) | (shifted == batch.tokens[:, 1:])).all()


def test_without_prompts_there_is_no_file_and_a_record_without_one_is_named(tmp_path: Path) -> None:
    data = prepare(replace(corpus(tmp_path), prompt_field=None))
    assert data.train.manifest.prompts_file is None
    assert not (data.train.folder / "prompts.bin").exists()
    assert not data.train.is_prompt(0, data.train.token_count).any()
    with pytest.raises(DataError, match=r"no key 'asks'; keys present: ask, say\. Set data\.prompt_field"):
        prepare(replace(corpus(tmp_path), prompt_field="asks", prepared_dir=str(tmp_path / "other")))


def test_a_long_prompt_is_a_prompt_to_its_end(tmp_path: Path) -> None:
    data = prepare(corpus(tmp_path, [("x" * 3_000_000, "yes"), ("a", "b"), ("c", "d"), ("e", "f")]))
    masks = [one.is_prompt(0, one.token_count) for one in (data.train, data.validation)]
    assert sum(int(mask.sum()) for mask in masks) == 3_000_003


@pytest.mark.parametrize("edges", [[3, 3], [5, 2], [0, 10**9], [-1, 4], [0, 4, 3, 6]])
def test_ranges_that_make_no_sense_are_refused(shards: TokenShards, edges: list[int]) -> None:
    np.array(edges, dtype="<i8").tofile(shards.folder / "prompts.bin")
    path = shards.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt_count": len(edges) // 2}))
    with pytest.raises(DataError, match="expected ranges of prompts that ascend"):
        open_token_set(shards.folder)
