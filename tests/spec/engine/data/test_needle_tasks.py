"""Needle tasks: exactly as long as a sequence, the sentence once and at its depth, not at all in the control."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.corpora import text_corpus
from testkit.needle_corpus import TEXTS, make_tasks, write_split
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FileFormat

from engine.config.errors import ConfigError, DataError
from engine.config.settings import DataConfig, RunConfig, TrainConfig
from engine.data.needles import NeedleTask, NeedleTasks, haystack, make_needle, needle_tasks, needle_text
from engine.data.prepare import prepare
from engine.data.shards import TokenShards
from engine.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe

quick = settings(deadline=None, max_examples=40)  # machines under load are slow


def words_of_pieces() -> FileTokenizer:
    """As the tokenizers of Llama 2: spaces are letters, and a text begins with one that nobody wrote."""
    pieces = ["<unk>", "</s>", "▁", *{*"".join(TEXTS), *map(chr, range(33, 127))} - {" "}]
    inner = FileFormat(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    return FileTokenizer(inner, "pieces")


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "bpe": train_bpe([*TEXTS, "The secret number of amber is 12345. " * 9], 400),
    "pieces": words_of_pieces(),
}


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenShards]:
    folder = tmp_path_factory.mktemp("splits")
    return {name: write_split(folder / name, tokenizer) for name, tokenizer in TOKENIZERS.items()}


def places(ids: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> list[int]:
    """Where `part` occurs in `ids`."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, part.size)
    return [int(index) for index in np.flatnonzero((windows == part).all(axis=1))]


def all_ids(task: NeedleTask) -> np.ndarray[Any, Any]:
    """The tokens of a task and the last one of its answer, which is a label alone."""
    return np.append(task.tokens, task.labels[-1])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(seq_len=st.integers(110, 3000), depths=st.integers(1, 6), samples=st.integers(1, 3), seed=st.integers(0, 2**63))
@quick
def test_a_task_is_a_sequence_with_its_sentence_where_it_should_be(
    splits: dict[str, TokenShards], name: str, seq_len: int, depths: int, samples: int, seed: int
) -> None:
    tokenizer = TOKENIZERS[name]
    tasks = make_tasks(splits[name], tokenizer, seq_len, depths=depths, samples=samples, seed=seed)
    for number in range(len(tasks)):
        (sample, depth), task = divmod(number, depths + 1), tasks.task(number)
        needle = tasks.needles[sample]
        assert task.tokens.shape == task.labels.shape == (seq_len,)
        ids = all_ids(task)
        asked = np.concatenate([needle.question, needle.answer])
        assert (ids[-asked.size :] == asked).all()
        assert tokenizer.eod_id not in ids
        hidden = places(ids[: -asked.size], needle.sentence)
        assert hidden == ([] if depth == depths else [tasks.position(sample, depth)])
        counted = task.labels != -100
        assert counted.sum() == needle.answer.size
        assert (task.labels[counted] == needle.answer).all()
        assert (task.labels[:-1][counted[:-1]] == task.tokens[1:][counted[:-1]]).all()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_depths_go_evenly_from_the_start_of_the_text_to_the_question(splits: dict[str, TokenShards], name: str) -> None:
    tasks = make_tasks(splits[name], TOKENIZERS[name], 1000, depths=5, samples=1)
    asked = tasks.needles[0].question.size + tasks.needles[0].answer.size
    last = 1001 - asked - tasks.needles[0].sentence.size
    positions = [tasks.position(0, depth) for depth in range(5)]
    assert positions[0] == 0
    assert positions[-1] == last  # right before the question
    assert np.abs(np.diff(positions) - last / 4).max() <= 1
    assert [tasks.share(depth) for depth in range(5)] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_reads_as_people_would_write_it(splits: dict[str, TokenShards], name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tasks = make_tasks(splits[name], tokenizer, 600)
    text = tokenizer.decode(all_ids(tasks.task(1)))
    (key, number), *others = re.findall(r"The secret number of (\w+) is (\d+)\.", text)
    assert not others
    assert text.rstrip().endswith(f"The secret number of {key} is {number}")
    control = tokenizer.decode(tasks.task(3).tokens)
    assert control.count(f"The secret number of {key} is") == 1
    assert "ducks swim" in control


def test_a_sample_has_the_same_haystack_at_every_depth(splits: dict[str, TokenShards]) -> None:
    tasks = make_tasks(splits["bytes"], TOKENIZERS["bytes"], 700)
    needle = tasks.needles[0]
    control = tasks.task(3).tokens
    for depth in range(3):
        position = tasks.position(0, depth)
        without = np.delete(tasks.task(depth).tokens, np.arange(position, position + needle.sentence.size))
        asked = needle.question.size + needle.answer.size - 1
        assert (without[:-asked] == control[: without.size - asked]).all()


def test_samples_have_texts_of_their_own(splits: dict[str, TokenShards]) -> None:
    tasks = make_tasks(splits["bytes"], TOKENIZERS["bytes"], 400, samples=3)
    starts = {bytes(tasks.task(4 * sample + 3).tokens[:60].astype(np.uint8)) for sample in range(3)}
    assert len(starts) == 3


def test_needles_differ_by_sample() -> None:
    assert len({needle_text(0, sample) for sample in range(200)}) > 150


def test_needles_differ_by_seed() -> None:
    assert needle_text(0, 0) != needle_text(1, 0)


def test_needles_of_a_seed_never_change() -> None:
    assert [needle_text(7, sample) for sample in range(2)] == [
        (" The secret number of fern is", " 41735"),
        (" The secret number of walnut is", " 41160"),
    ]


def test_keys_of_needles_are_words() -> None:
    keys = {needle_text(0, sample)[0].split()[-2] for sample in range(2000)}
    assert len(keys) == 77
    assert all(key.isalpha() for key in keys)


def test_numbers_of_needles_have_five_digits() -> None:
    numbers = {needle_text(seed, 0)[1] for seed in range(200)}
    assert all(re.fullmatch(r" [1-9]\d{4}", number) for number in numbers)


@given(start=st.integers(0, 10**6), count=st.integers(0, 9000))
@quick
def test_a_haystack_wraps_around_at_the_end_of_the_split(
    splits: dict[str, TokenShards], start: int, count: int
) -> None:
    shards = splits["bytes"]
    ids = shards.read(0, shards.token_count)
    turned = np.roll(ids, -(start % shards.token_count))
    text = turned[turned != shards.manifest.eod_id]
    assert (haystack(shards, start, count) == np.resize(text, count)).all()


def test_a_split_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text to hide a sentence in"):
        haystack(write_split(tmp_path, ByteTokenizer(), ("", "", "")), 0, 5)


def test_a_tokenizer_that_cannot_spell_numbers_is_an_error() -> None:
    inner = FileFormat(models.WordLevel({"[UNK]": 0, "</s>": 1, "the": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match=r"tokenizer words spells the number '48217' as"):
        make_needle(FileTokenizer(inner, "words"), " The secret number of amber is", " 48217")


def tasks_of_run(data: DataConfig, seq_len: int, depths: int = 3) -> NeedleTasks | None:
    train = TrainConfig(seq_len=seq_len, eval_needle_depths=depths, eval_needle_samples=5)
    return needle_tasks(RunConfig(data=data, train=train), prepare(data))


def test_a_run_without_depths_has_no_needle_tasks(tmp_path: Path) -> None:
    assert tasks_of_run(text_corpus(tmp_path, "".join(TEXTS) * 9), 200, depths=0) is None


def test_the_error_for_a_short_sequence_names_a_sufficient_length(tmp_path: Path) -> None:
    data = text_corpus(tmp_path, "".join(TEXTS) * 9)
    with pytest.raises(ConfigError, match=r"set train\.seq_len=\d+ or more") as caught:
        tasks_of_run(data, 40)
    enough = int(re.findall(r"set train\.seq_len=(\d+)", str(caught.value))[0])
    tasks = tasks_of_run(data, enough)
    assert tasks is not None
    assert [tasks.task(number).tokens.size for number in range(len(tasks))] == [enough] * 5 * (3 + 1)
