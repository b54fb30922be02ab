"""The sampler: every sample once per epoch, in the same order however a step is divided, prompts unlabelled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import make_shards, packed, quick
from hypothesis import given
from hypothesis import strategies as st
from testkit.corpora import record_corpus

from engine.config.errors import DataError
from engine.data.prepare import prepare
from engine.data.sampler import IGNORE_INDEX, permute, sequential_batches
from engine.data.shards import TokenShards


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Ids 0, 1, 2, ... 999: a token tells where it came from."""
    return make_shards(tmp_path_factory.mktemp("sets") / "counting", list(range(1000)), vocab_size=1000)


@given(size=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@quick
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(position, size, (seed, epoch)) for position in range(size)) == list(range(size))


def test_orders_and_batches_stay_what_they_were_as_runs_that_resume_rely_on_it(counting: TokenShards) -> None:
    assert [permute(position, 10, (1, 2)) for position in range(10)] == [8, 9, 6, 1, 4, 3, 7, 2, 0, 5]
    assert [permute(position, 10, (-3, 2**70)) for position in range(10)] == [4, 3, 5, 8, 1, 0, 9, 2, 7, 6]
    sampler = packed(counting, 37, 1, grad_accum_steps=2)
    batch = sampler.batch(20, 1, 2, 3, 4)  # in the tenth epoch
    assert batch.tokens.shape == batch.labels.shape == (4, 37)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert (batch.labels == batch.tokens + 1).all()
    assert batch.samples == (500, 501, 502, 503)
    assert (batch.tokens[:, 0] // 37).tolist() == [2, 13, 6, 10]
    sampler.start_at(20, 7)
    assert sampler.batch(20, 1, 2, 3, 4).samples == (27, 28, 29, 30)


@given(seq_len=st.integers(1, 30), step=st.integers(0, 50), seed=st.integers(0, 9))
@quick
def test_a_step_has_the_same_samples_however_it_is_divided(
    counting: TokenShards, seq_len: int, step: int, seed: int
) -> None:
    seen = []
    for grad_accum_steps, dp_size, batch_size in ((1, 1, 12), (1, 4, 3), (3, 2, 2), (12, 1, 1), (2, 6, 1)):
        sampler = packed(counting, seq_len, seed, grad_accum_steps=grad_accum_steps)
        parts = [
            sampler.batch(step, micro_step, dp_rank, dp_size, batch_size).tokens
            for micro_step in range(grad_accum_steps)
            for dp_rank in range(dp_size)
        ]
        seen.append(np.concatenate(parts).tolist())
    assert all(rows == seen[0] for rows in seen)


def test_a_corpus_shorter_than_a_sample_says_what_would_fit(counting: TokenShards, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 1,000 tokens, but seq_len=1,000 needs at least 1,001.*at most 999"):
        packed(counting, 1000, 0)
    assert packed(counting, 999, 0).sources[0].per_epoch == 1
    with pytest.raises(DataError, match="has 1 tokens; at least 2"):
        list(sequential_batches(make_shards(tmp_path / "s", [1]), 4, batch_size=1))


@given(
    count=st.integers(2, 80),
    seq_len=st.integers(1, 100),
    batch_size=st.integers(1, 3),
    dp_size=st.integers(1, 4),
    max_samples=st.none() | st.integers(1, 30),
)
@quick
def test_validation_sees_every_token_once_however_it_is_divided_and_all_ranks_are_asked_equally_often(
    counting: TokenShards, count: int, seq_len: int, batch_size: int, dp_size: int, max_samples: int | None
) -> None:
    shards = counting.split_tail(1 - count / 1000)[0]
    how: dict[str, Any] = {"batch_size": batch_size, "max_samples": max_samples}
    ranks = [list(sequential_batches(shards, seq_len, dp=(rank, dp_size), **how)) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen: Counter[int] = Counter()
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.tokens.shape == batch.labels.shape == (batch_size, seq_len)
        real = batch.labels != IGNORE_INDEX
        assert (batch.labels[real] == batch.tokens[real] + 1).all()
        seen.update(batch.labels[real].tolist())
    last = count if max_samples is None else min(count, max_samples * seq_len + 1)
    assert seen == Counter(range(1, last))


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("seq_len", [1, 3, 4, 7])
def test_where_documents_are_apart_no_label_is_of_the_next_one(tmp_path: Path, seq_len: int, indexed: bool) -> None:
    tokens = [1, 9, 2, 2, 9, 3, 9, 4, 4, 4, 4, 4, 9, 5, 5, 9]
    starts = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == 9)]
    shards = make_shards(tmp_path, tokens, starts if indexed else (), vocab_size=10, eod_id=9)
    expected = [-100 if place in starts else tokens[place] for place in range(1, len(tokens))]
    sampler = packed(shards, seq_len, 0)
    sampler.documents_apart = True
    of_training = {sample: sampler.batch(sample, 0, 0, 1, 1) for sample in range(sampler.sources[0].per_epoch)}
    for number, batch in of_training.items():
        first = sampler.sources[0][number] * seq_len
        assert batch.labels[0].tolist() == expected[first : first + seq_len]
    batches = list(sequential_batches(shards, seq_len, batch_size=1, documents_apart=True))
    assert np.concatenate([batch.labels[0] for batch in batches])[: len(expected)].tolist() == expected
    for start, batch in zip(range(0, len(tokens) - 1, seq_len), batches, strict=True):
        inside = range(start + 1, min(start + seq_len, len(tokens) - 1))
        assert batch.documents[0].tolist() == [0, *(place - start for place in inside if place in starts)]


PAIRS = {f"answer {index * 7}.": f"question {index}? " for index in range(60)} | {"no prompt": "", "": "no answer"}


def test_exactly_the_answers_are_learned_wherever_samples_are_cut(tmp_path: Path) -> None:
    long = "x" * 1_500_000  # two pieces
    records = [{"ask": ask, "say": say} for say, ask in PAIRS.items()] + [{"ask": long, "say": "long"}]
    data = prepare(record_corpus(tmp_path, records, text_field="say", prompt_field="ask"))
    answers: list[str] = []
    for shards in (data.train, data.validation):
        whole, mask = shards.read(0, shards.token_count), shards.is_prompt(0, shards.token_count)
        texts = bytes(np.where(whole == 255, 0, whole)[~mask].astype(np.uint8)).decode().split("\0")[:-1]
        asked = bytes(whole[mask].astype(np.uint8)).decode()
        assert asked == "".join({**PAIRS, "long": long}[text] for text in texts)
        answers += texts
        parts = [part.is_prompt(0, part.token_count) for part in shards.split_tail(0.3)]  # windows know their prompts
        assert np.array_equal(np.concatenate(parts), mask)
        for seq_len in (5, 64):
            batches = sequential_batches(shards, seq_len, batch_size=3, max_samples=99)
            labels = np.concatenate([batch.labels.ravel() for batch in batches])[: min(99 * seq_len, whole.size - 1)]
            assert (labels == np.where(mask, IGNORE_INDEX, whole)[1 : labels.size + 1]).all()
    assert sorted(answers) == sorted([*PAIRS, "long"])
