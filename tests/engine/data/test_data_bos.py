"""The first token of every document is the one that transformers puts there, and old data is not taken for new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.corpora import record_corpus
from tokenizer_families import FAMILIES, write_family, write_tokenizer
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from engine.config.errors import DataError
from engine.config.settings import DataConfig, RunConfig
from engine.data.needles import needle_tasks
from engine.data.prepare import PreparedData, open_prepared, open_training_data, prepare
from engine.data.sampler import sequential_batches
from engine.data.shards import TokenShards

TEXTS = [f"hello there world {index}, say more please " * 9 for index in range(30)]
BOS = "<|bos|>"
TEMPLATES = {"none": None, "start": f"{BOS} $A", "both": f"{BOS} $A <|eot|>", "two": f"<|head|> {BOS} $A"}


def tokenizer_of(folder: Path, template: str | None, **settings: Any) -> str:
    """A tokenizer.json with this template, and `settings` in the file beside it."""
    path = write_tokenizer(folder, **settings)
    if template is not None:
        inner = Tokenizer.from_file(str(path))
        special = [(token, inner.token_to_id(token)) for token in (BOS, "<|head|>", "<|eot|>")]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        inner.save(str(path))
    return str(path)


def config_of(tmp_path: Path, tokenizer: str, texts: Sequence[str] = TEXTS, **settings: Any) -> DataConfig:
    records = [{"text": text, "ask": text[:11]} for text in texts]
    return record_corpus(tmp_path, records, tokenizer=tokenizer, **settings)


def documents_of(shards: TokenShards) -> list[list[int]]:
    tokens = shards.read(0, shards.token_count)
    return [part.tolist() for part in np.split(tokens, shards.document_offsets(0, tokens)[1:])]


def all_documents(data: PreparedData) -> list[list[int]]:
    return sorted(documents_of(data.train) + documents_of(data.validation))


@pytest.mark.parametrize(
    ("template", "settings"),
    [*((name, {}) for name in TEMPLATES), ("none", {"add_bos_token": True}), ("start", {"add_bos_token": False})],
)
def test_documents_begin_as_transformers_begins_them(tmp_path: Path, template: str, settings: dict[str, Any]) -> None:
    path = tokenizer_of(tmp_path / "model", TEMPLATES[template], **settings)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = prepare(config_of(tmp_path, path))
    after_text = theirs.convert_tokens_to_ids("<|eot|>")
    whole = [[token for token in theirs(text)["input_ids"] if token != after_text] for text in TEXTS]
    assert all_documents(data) == sorted([*ids, data.train.manifest.eod_id] for ids in whole)


ODD_TEXTS = {
    "words": "hello there world, it's 1234 numbers",
    "whitespace": "  leading, trailing \t and\n\n\n many\r\n   lines  ",
    "only whitespace": " \n ",
    "unicode": "größe €uro 😀 naïve e\u0301 漢字 \u200d\u00a0x \x00 \ufeff",
    "special tokens are text": "so <|endoftext|></s> <s><|im_end|> <|begin_of_text|><|eot_id|><unk>.",
    "long": "hello" * 2_000 + " there" * 2_000,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_whole_families_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / "model", family)
    _, start, end, _ = FAMILIES[family]
    theirs = AutoTokenizer.from_pretrained(path.parent, split_special_tokens=True)
    data = prepare(config_of(tmp_path, str(path), ["", *ODD_TEXTS.values(), ""]))
    found = all_documents(data)
    for name, text in ODD_TEXTS.items():
        expected = [*theirs(text)["input_ids"], theirs.convert_tokens_to_ids(end)]
        assert expected in found, f"{name}: {theirs.convert_ids_to_tokens(expected[:30])}"
    assert len(found) == len(ODD_TEXTS), "a text without a character is no document"
    assert data.train.manifest.bos_ids == (() if start is None else (theirs.convert_tokens_to_ids(start),))


def test_without_it_documents_begin_with_their_text(tmp_path: Path) -> None:
    data = prepare(config_of(tmp_path, tokenizer_of(tmp_path / "model", TEMPLATES["start"]), bos="off"))
    ids = data.load_tokenizer().encode(TEXTS)
    assert all_documents(data) == sorted([*text.tolist(), data.train.manifest.eod_id] for text in ids)
    assert data.train.manifest.bos_ids == ()


def test_first_tokens_hold_no_text_and_are_read_not_learned_before_a_prompt(tmp_path: Path) -> None:
    path = tokenizer_of(tmp_path / "model", TEMPLATES["start"])
    data = prepare(config_of(tmp_path, path, prompt_field="ask"))
    assert data.token_bytes is not None
    assert data.token_bytes[list(data.train.manifest.bos_ids)].tolist() == [0]
    shards = data.train
    tokens = shards.read(0, shards.token_count)
    assert shards.is_prompt(0, shards.token_count)[tokens == shards.manifest.bos_ids[0]].all()
    assert data.token_bytes[tokens].sum() == shards.text_bytes


def test_validation_and_needles_begin_with_it_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, tokenizer_of(tmp_path / "model", TEMPLATES["start"]))
    data = prepare(config)
    first = next(iter(sequential_batches(data.validation, 32, batch_size=1)))
    assert first.tokens[0, 0] == data.validation.manifest.bos_ids[0]
    run = RunConfig(data=config)
    run = replace(run, train=replace(run.train, seq_len=300, eval_needle_depths=3))
    tasks = needle_tasks(run, data)
    assert tasks is not None
    positions = []
    for number in range(4):  # at every depth, and in the control
        task, sentence = tasks.task(number), tasks.needles[0].sentence
        assert task.tokens.size == 300
        assert np.flatnonzero(task.tokens == tasks.shards.manifest.bos_ids[0]).tolist() == [0]
        sample, place = divmod(number, tasks.depths + 1)
        if place < tasks.depths:
            positions.append(tasks.position(sample, place))
            assert (task.tokens[positions[-1] : positions[-1] + sentence.size] == sentence).all()
    assert positions[0] == 1
    assert all(low < high for low, high in pairwise(positions))


def test_data_with_and_without_it_are_not_taken_for_each_other_and_do_not_mix(tmp_path: Path) -> None:
    config = config_of(tmp_path, tokenizer_of(tmp_path / "model", TEMPLATES["start"]))
    prepare(config)
    with pytest.raises(DataError, match="bos: made with 'auto', now 'off'"):
        open_prepared(replace(config, bos="off"))
    prepare(replace(config, bos="off", prepared_dir=str(tmp_path / "other")))
    with pytest.raises(DataError, match=r"and beginning \[3\].*same data\.tokenizer and data\.bos"):
        open_training_data(replace(config, mix_paths=(str(tmp_path / "other"),), mix_weights=(0.5, 0.5)))
