"""Tokenizers: ids are those of transformers, ids and text are the same thing, and every byte of text is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.corpora import record_corpus
from testkit.data_helpers import quick
from testkit.tokenizer_families import FAMILIES, write_family, write_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from engine.config.errors import DataError
from engine.config.settings import DataConfig, RunConfig
from engine.data.needles import needle_tasks
from engine.data.prepare import PreparedData, open_prepared, open_training_data, prepare
from engine.data.sampler import sequential_batches
from engine.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer_file, train_bpe

CORPUS = ["def encode(self, text):\n    return text.encode()\n" * 20, "größe €uro 😀 naïve\n" * 10]
BPE = train_bpe(CORPUS, 320)
EXACT: list[Any] = [ByteTokenizer(), BPE]
TOKEN_BYTES = {tokenizer.name: tokenizer.token_bytes() for tokenizer in EXACT}


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda tokenizer: tokenizer.name)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@quick
def test_decoded_ids_are_the_text(tokenizer: Any, text: str) -> None:
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text
    assert tokenizer.eod_id not in ids


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda tokenizer: tokenizer.name)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@quick
def test_ids_are_below_the_vocabulary_size(tokenizer: Any, text: str) -> None:
    [ids] = tokenizer.encode([text])
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda tokenizer: tokenizer.name)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@quick
def test_token_bytes_add_up_to_the_text(tokenizer: Any, text: str) -> None:
    [ids] = tokenizer.encode([text])
    assert TOKEN_BYTES[tokenizer.name][tokenizer.eod_id] == 0
    assert TOKEN_BYTES[tokenizer.name][ids].sum() == len(text.encode())


def test_bpe_training_is_deterministic(tmp_path: Path) -> None:
    train_bpe(CORPUS, 320).save(tmp_path)
    written = (tmp_path / "tokenizer.json").read_bytes()
    BPE.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == written


def test_saved_bpe_encodes_as_before(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    loaded = load_tokenizer_file(tmp_path / "tokenizer.json", "bpe")
    assert loaded.name == "bpe"
    assert loaded.vocab_size == BPE.vocab_size
    assert loaded.encode(CORPUS)[0].tolist() == BPE.encode(CORPUS)[0].tolist()


def test_bpe_compresses_its_corpus_within_the_vocabulary() -> None:
    assert BPE.vocab_size <= 320
    assert BPE.encode(CORPUS)[0].size < len(CORPUS[0]) / 2


@pytest.mark.parametrize(("text", "merges"), [("ab", 0), ("ab ab", 1)])
def test_bpe_merges_only_pairs_that_occur_twice(text: str, merges: int) -> None:
    assert train_bpe([text], 5000).vocab_size == 256 + 1 + merges


def test_bpe_encodes_bytes_that_its_corpus_lacks() -> None:
    tiny = train_bpe(["ab"], 5000)
    assert tiny.decode(*tiny.encode(["\x00ÿ€"])) == "\x00ÿ€"


def make_word_level(**tokens: int) -> Tokenizer:
    inner = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2, **tokens}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


def test_bytes_of_byte_fallback_tokens_add_up_to_the_text() -> None:
    tokenizer = FileTokenizer(FAMILIES["mistral"][0](), "mistral")
    text = " hello a é€a a"  # with the space that a text begins with there
    [ids] = tokenizer.encode([text])
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes()[tokenizer.eod_id] == 0


def test_ids_that_no_token_has_count_no_bytes() -> None:
    words = FileTokenizer(make_word_level(**{"</s>": 10}), "words")
    assert words.token_bytes()[[0, 1, 7, words.eod_id]].tolist() == [6, 6, 0, 0]
    assert words.token_bytes().shape == (words.vocab_size,) == (11,)


def test_length_limits_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    inner = make_word_level(**{"</s>": 3})
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode(["hello world hello world"])[0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"bad\.json is missing: expected a tokenizer\.json, or a folder with one"),
        (b"not json", r"tokenizer .*bad\.json cannot be loaded \("),
        (b"{}", r"bad\.json cannot be loaded"),
        (b"\xff\xfe", r"bad\.json cannot be loaded"),
        (make_word_level().to_str().encode(), r"bad\.json has no end-of-document token \(looked for eos_token in"),
    ],
)
def test_unusable_tokenizer_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer_file(tmp_path / "bad.json")


# --- first tokens -----------------------------------------------------------------------------------------------------

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


def begun_corpus(tmp_path: Path, **settings: Any) -> DataConfig:
    return config_of(tmp_path, tokenizer_of(tmp_path / "model", TEMPLATES["start"]), **settings)


def all_documents(data: PreparedData) -> list[list[int]]:
    """Ids of the documents of both splits, sorted."""
    found = []
    for shards in (data.train, data.validation):
        tokens = shards.read(0, shards.token_count)
        found += [part.tolist() for part in np.split(tokens, shards.document_offsets(0, tokens)[1:])]
    return sorted(found)


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
    start = FAMILIES[family][1]
    theirs = AutoTokenizer.from_pretrained(path.parent, split_special_tokens=True)
    data = prepare(config_of(tmp_path, str(path), ["", *ODD_TEXTS.values(), ""]))
    found = all_documents(data)
    for name, text in ODD_TEXTS.items():
        expected = [*theirs(text)["input_ids"], theirs.eos_token_id]
        assert expected in found, f"{name}: {theirs.convert_ids_to_tokens(expected[:30])}"
    assert len(found) == len(ODD_TEXTS), "a text without a character is no document"
    assert data.train.manifest.bos_ids == (() if start is None else (theirs.convert_tokens_to_ids(start),))


@pytest.fixture(scope="module")
def begun_prompts(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Prompts and answers, each beginning with a bos token; the last one is read in two chunks."""
    folder, texts = tmp_path_factory.mktemp("prompts"), [*TEXTS, "hello there " * 100_000]
    tokenizer = tokenizer_of(folder / "model", TEMPLATES["start"])
    return prepare(replace(config_of(folder, tokenizer, texts, prompt_field="ask"), prepared_dir=str(folder / "out")))


def test_every_prompt_begins_with_one_bos_token(begun_prompts: PreparedData) -> None:
    splits = (begun_prompts.train, begun_prompts.validation)
    found = sum((shards.read(0, shards.token_count) == shards.manifest.bos_ids[0]).sum() for shards in splits)
    assert found == len(TEXTS) + 1


def test_bos_tokens_before_a_prompt_are_not_learned(begun_prompts: PreparedData) -> None:
    for shards in (begun_prompts.train, begun_prompts.validation):
        tokens, [first] = shards.read(0, shards.token_count), shards.manifest.bos_ids
        assert shards.is_prompt(0, shards.token_count)[tokens == first].all()


def test_bos_tokens_have_no_text_bytes(begun_prompts: PreparedData) -> None:
    token_bytes = begun_prompts.token_bytes
    assert token_bytes is not None
    for shards in (begun_prompts.train, begun_prompts.validation):
        assert token_bytes[shards.manifest.bos_ids[0]] == 0
        assert token_bytes[shards.read(0, shards.token_count)].sum() == shards.text_bytes


def test_bytes_of_a_set_are_those_of_its_text_where_added_tokens_swallow_blanks(tmp_path: Path) -> None:
    inner = train_bpe(CORPUS, 320).inner
    inner.add_tokens([AddedToken("<gap>", lstrip=True, rstrip=True, special=False), "é"])
    inner.save(str(tmp_path / "tokenizer.json"))
    texts = ["two words   <gap>   and more " * 20, "<gap>\n\n<gap> é " * 9, "plain " * 30]
    data = prepare(config_of(tmp_path, str(tmp_path / "tokenizer.json"), texts))
    assert data.token_bytes is not None
    assert data.token_bytes[inner.token_to_id("é")] == 2, "an added token counts the UTF-8 of its text"
    total = 0.0
    for shards in (data.train, data.validation):
        total += float((data.token_bytes * shards.byte_ratio)[shards.read(0, shards.token_count)].sum())
    assert total == pytest.approx(sum(len(text.encode()) for text in texts)), "bytes are not those of the text"


def test_validation_begins_with_a_bos_token(tmp_path: Path) -> None:
    data = prepare(begun_corpus(tmp_path))
    first = next(iter(sequential_batches(data.validation, 32, batch_size=1)))
    assert first.tokens[0, 0] == data.validation.manifest.bos_ids[0]


def test_needle_tasks_begin_with_a_bos_token(tmp_path: Path) -> None:
    config = begun_corpus(tmp_path)
    data = prepare(config)
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


def test_bos_off_is_other_data_than_bos_auto(tmp_path: Path) -> None:
    config = begun_corpus(tmp_path)
    prepare(config)
    with pytest.raises(DataError, match="bos: made with 'auto', now 'off'"):
        open_prepared(replace(config, bos="off"))


def test_without_bos_documents_begin_with_their_text(tmp_path: Path) -> None:
    data = prepare(replace(begun_corpus(tmp_path), bos="off"))
    ids = data.load_tokenizer().encode(TEXTS)
    assert all_documents(data) == sorted([*text.tolist(), data.train.manifest.eod_id] for text in ids)
    assert data.train.manifest.bos_ids == ()


def test_corpora_with_other_bos_tokens_are_not_mixed(tmp_path: Path) -> None:
    config = begun_corpus(tmp_path)
    prepare(config)
    prepare(replace(config, bos="off", prepared_dir=str(tmp_path / "other")))
    with pytest.raises(DataError, match=r"and beginning \[3\].*same data\.tokenizer and data\.bos"):
        open_training_data(replace(config, mix_paths=(str(tmp_path / "other"),), mix_weights=(0.5, 0.5)))
