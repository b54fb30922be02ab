"""The sampler: every sample once per epoch, in the same order however a step is divided; shares of sets and lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testkit.corpora import record_corpus, text_corpus
from testkit.data_helpers import make_shards, quick

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.manifest import Manifest
from engine.data.prepare import open_training_data, prepare
from engine.data.sampler import (
    BLOCK,
    IGNORE_INDEX,
    Batch,
    Sampler,
    Samples,
    by_length,
    length_classes,
    permute,
    sequential_batches,
)
from engine.data.shards import TokenShards

SEQ_LEN = 10


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Ids 0, 1, 2, ... 999: a token tells where it came from."""
    return make_shards(tmp_path_factory.mktemp("sets") / "counting", list(range(1000)), vocab_size=1000)


def packed(shards: TokenShards, seq_len: int, seed: int, **settings: Any) -> Sampler:
    """Batches of one token set."""
    return Sampler([Samples(shards, seq_len, seed)], **settings)


@given(size=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@quick
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(position, size, (seed, epoch)) for position in range(size)) == list(range(size))


@pytest.mark.parametrize(
    ("key", "order"),
    [((1, 2), [8, 9, 6, 1, 4, 3, 7, 2, 0, 5]), ((-3, 2**70), [4, 3, 5, 8, 1, 0, 9, 2, 7, 6])],
)
def test_order_of_an_epoch_never_changes(key: tuple[int, int], order: list[int]) -> None:
    """Runs that resume rely on it."""
    assert [permute(position, 10, key) for position in range(10)] == order


def test_batch_of_a_step_never_changes(counting: TokenShards) -> None:
    """Runs that resume rely on it."""
    batch = packed(counting, 37, 1, grad_accum_steps=2).batch(20, 1, 2, 3, 4)  # in the tenth epoch
    assert batch.samples == (500, 501, 502, 503)
    assert (batch.tokens[:, 0] // 37).tolist() == [2, 13, 6, 10]


def test_labels_are_the_next_tokens(counting: TokenShards) -> None:
    batch = packed(counting, 37, 1).batch(20, 0, 2, 3, 4)
    assert batch.tokens.shape == batch.labels.shape == (4, 37)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert (batch.labels == batch.tokens + 1).all()


def test_sampler_continues_with_the_sample_it_is_given(counting: TokenShards) -> None:
    sampler = packed(counting, 37, 1, grad_accum_steps=2)
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


def test_a_corpus_shorter_than_a_sample_is_refused_with_the_longest_seq_len(
    counting: TokenShards, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"has 1,000 tokens, but seq_len=1,000 needs at least 1,001.*at most 999"):
        packed(counting, 1000, 0)
    assert packed(counting, 999, 0).sources[0].per_epoch == 1
    with pytest.raises(DataError, match="has 1 tokens; at least 2"):
        list(sequential_batches(make_shards(tmp_path / "s", [1]), 4, batch_size=1))


class Validation(NamedTuple):
    """The first `count` tokens as validation data of `dp_size` ranks."""

    count: int
    seq_len: int
    batch_size: int
    dp_size: int
    max_samples: int | None

    def batches(self, counting: TokenShards) -> list[list[Batch]]:
        """Return the batches of every rank."""
        shards = counting.split_tail(1 - self.count / 1000)[0]
        how: dict[str, Any] = {"batch_size": self.batch_size, "max_samples": self.max_samples}
        ranks = range(self.dp_size)
        return [list(sequential_batches(shards, self.seq_len, dp=(rank, self.dp_size), **how)) for rank in ranks]


VALIDATIONS = st.builds(
    Validation,
    count=st.integers(2, 80),
    seq_len=st.integers(1, 100),
    batch_size=st.integers(1, 3),
    dp_size=st.integers(1, 4),
    max_samples=st.none() | st.integers(1, 30),
)


@given(VALIDATIONS)
@quick
def test_validation_sees_every_token_once_on_any_number_of_ranks(counting: TokenShards, case: Validation) -> None:
    seen: Counter[int] = Counter()
    for batch in (batch for batches in case.batches(counting) for batch in batches):
        assert batch.tokens.shape == batch.labels.shape == (case.batch_size, case.seq_len)
        real = batch.labels != IGNORE_INDEX
        assert (batch.labels[real] == batch.tokens[real] + 1).all()
        seen.update(batch.labels[real].tolist())
    last = case.count if case.max_samples is None else min(case.count, case.max_samples * case.seq_len + 1)
    assert seen == Counter(range(1, last))


@given(VALIDATIONS)
@quick
def test_all_ranks_have_equally_many_validation_batches(counting: TokenShards, case: Validation) -> None:
    assert len({len(batches) for batches in case.batches(counting)}) == 1


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("seq_len", [1, 3, 4, 7])
def test_where_documents_are_apart_no_label_is_of_the_next_one(tmp_path: Path, seq_len: int, indexed: bool) -> None:
    tokens = [1, 9, 2, 2, 9, 3, 9, 4, 4, 4, 4, 4, 9, 5, 5, 9]
    starts = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == 9)]
    shards = make_shards(tmp_path, tokens, starts if indexed else (), vocab_size=10, eod_id=9)
    expected = [-100 if place in starts else tokens[place] for place in range(1, len(tokens))]
    sampler = packed(shards, seq_len, 0, documents_apart=True)
    for number in range(sampler.sources[0].per_epoch):
        first = sampler.sources[0][number] * seq_len
        assert sampler.batch(number, 0, 0, 1, 1).labels[0].tolist() == expected[first : first + seq_len]
    batches = list(sequential_batches(shards, seq_len, batch_size=1, documents_apart=True))
    assert np.concatenate([batch.labels[0] for batch in batches])[: len(expected)].tolist() == expected
    for start, batch in zip(range(0, len(tokens) - 1, seq_len), batches, strict=True):
        inside = range(start + 1, min(start + seq_len, len(tokens) - 1))
        assert batch.documents[0].tolist() == [0, *(place - start for place in inside if place in starts)]


PAIRS = {f"answer {index * 7}.": f"question {index}? " for index in range(60)} | {"no prompt": "", "": "no answer"}


def test_exactly_the_answers_are_learned_wherever_samples_are_cut(tmp_path: Path) -> None:
    long = "x" * 1_500_000  # two chunks
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


# --- several sets -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Samples]:
    """Three sets, whose tokens say where they come from: 0 to 999, 1000 to 1499, 1500 to 1519."""
    folder = tmp_path_factory.mktemp("sets")
    ranges = (range(1000), range(1000, 1500), range(1500, 1520))
    return [Samples(make_shards(folder / str(ids.start), ids, vocab_size=1520), SEQ_LEN, 5) for ids in ranges]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0,), [BLOCK]),
        ((1.0, 1.0, 1.0), [3334, 3333, 3333]),
        ((0.7, 0.2, 0.1), [7000, 2000, 1000]),
        ((1e9, 1.0, 1e-9), [BLOCK - 2, 1, 1]),
        ((0.99985, 0.0001, 0.00005), [BLOCK - 2, 1, 1]),
    ],
)
def test_shares_follow_the_weights_with_at_least_one_sample(
    sources: list[Samples], weights: tuple[float, ...], expected: list[int]
) -> None:
    assert sorted(Sampler(sources[: len(weights)], weights).shares, reverse=True) == expected


def test_every_block_has_the_share_of_each_source(sources: list[Samples]) -> None:
    mixed = Sampler(sources, (0.7, 0.2, 0.1), seed=1)
    for block in range(2):
        places = [mixed.locate(block * BLOCK + position) for position in range(BLOCK)]
        drawn = np.array([int(shards.folder.name) for shards, _ in places])
        for samples, start, share in zip(sources, (0, 1000, 1500), (7000, 2000, 1000), strict=True):
            own = [places[position][1] for position in np.flatnonzero(drawn == start)]
            expected = [samples[number] for number in range(block * share, (block + 1) * share)]
            assert sorted(own) == sorted(expected)  # those that come next in its own order
            assert abs((drawn[:1000] == start).mean() - share / BLOCK) < 0.06  # and early in it about as many


def test_rows_of_a_mixture_are_whole_samples(sources: list[Samples]) -> None:
    batch = Sampler(sources, (1.0, 1.0, 1.0), seed=1).batch(0, 0, 0, 1, 64)
    # As it always was: runs that resume rely on it.
    assert batch.tokens[:9, 0].tolist() == [1500, 1450, 1000, 1420, 1460, 1420, 1500, 1500, 1110]
    assert {int(row[0]) // 500 for row in batch.tokens} >= {0, 2, 3}
    assert (np.diff(batch.tokens, axis=1) == 1).all()
    assert (batch.labels == batch.tokens + 1).all()


def prepared(tmp_path: Path, letter: str, **settings: Any) -> DataConfig:
    """Sixty short documents of a small letter and six long ones of a capital, which only this corpus has."""
    texts = [f"{index % 10}" + (letter * 29 if index < 60 else letter.upper() * 299) for index in range(66)]
    config = text_corpus(tmp_path / letter, *texts, validation_fraction=0.1, **settings)
    prepare(config)
    return config


def test_each_corpus_of_a_mixture_is_divided_by_length_within_itself(tmp_path: Path) -> None:
    main, other, bpe = prepared(tmp_path, "a"), prepared(tmp_path, "b"), prepared(tmp_path, "c", tokenizer="bpe")
    mixed = replace(main, mix_paths=(str(other.prepared_dir),), mix_weights=(1.0, 3.0))
    config = replace(mixed, length_buckets=(100,), length_weights=(0.2, 0.8))
    sampler = open_training_data(config).sampler(20, 0, grad_accum_steps=1)
    counts: Counter[str] = Counter()
    for start in range(0, BLOCK, 1000):
        for row in sampler.batch(0, 0, start // 1000, 10, 1000).tokens:
            letters = Counter(chr(token) for token in row if chr(token).isalpha())
            counts[letters.most_common(1)[0][0]] += 1
    assert counts == {"a": 500, "A": 2000, "b": 1500, "B": 6000}
    with pytest.raises(DataError, match=r"Prepare both with the same data\.tokenizer"):
        open_training_data(replace(mixed, mix_paths=(str(bpe.prepared_dir),)))


def test_settings_of_the_sampler_change_only_the_content_hash(tmp_path: Path) -> None:
    main, other = prepared(tmp_path, "a"), prepared(tmp_path, "b")
    plain = open_training_data(main)
    assert plain.content_hash == plain.main.content_hash
    assert plain.sampler(20, 0, grad_accum_steps=1).shares == []
    lengths = [((100,), (0.2, 0.8)), ((100,), (0.3, 0.7)), ((90,), (0.2, 0.8))]
    changed: list[dict[str, Any]] = [
        *({"length_buckets": buckets, "length_weights": weights} for buckets, weights in lengths),
        *({"mix_paths": (str(other.prepared_dir),), "mix_weights": weights} for weights in ((1.0, 3.0), (1.0, 2.0))),
        *({"echo_tokens": tokens} for tokens in (8, 16)),
    ]
    configs = [replace(main, **changes) for changes in changed]
    assert len({plain.content_hash, *(open_training_data(config).content_hash for config in configs)}) == 8
    assert {prepare(config).path for config in configs} == {plain.main.path}


def test_echoed_tokens_repeat_in_every_row(tmp_path: Path) -> None:
    config = replace(prepared(tmp_path, "a"), echo_tokens=16)
    batch = open_training_data(config).sampler(32, 0, grad_accum_steps=1).batch(0, 0, 0, 1, 4)
    np.testing.assert_array_equal(batch.tokens[:, :16], batch.tokens[:, 16:])  # echoed
    np.testing.assert_array_equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert all(starts.tolist() == [0] for starts in batch.documents)


# --- classes by length ------------------------------------------------------------------------------------------------


def corpus_of(folder: Path, lengths: list[int], *, seq_len: int = SEQ_LEN) -> Samples:
    """Documents of these lengths; token i of the whole is i."""
    shards = make_shards(folder, range(sum(lengths)), [0, *accumulate(lengths[:-1])], vocab_size=sum(lengths))
    return Samples(shards, seq_len, 5)


def classes_by_hand(document_of: list[int], seq_len: int, buckets: list[int]) -> list[int]:
    """The class of every sample, its tokens counted one by one."""
    classes = []
    for first in range(0, len(document_of) - seq_len, seq_len):
        counts = Counter(document_of[first : first + seq_len])
        document = min(document for document, count in counts.items() if count == max(counts.values()))
        classes.append(sum(document_of.count(document) >= bucket for bucket in buckets))
    return classes


def classes_of(corpus: Samples, buckets: list[int]) -> list[int]:
    """The class of every sample."""
    classes = length_classes(corpus, rule(tuple(buckets), (0.0,) * (len(buckets) + 1)))
    return [index for number in range(corpus.per_epoch) for index, one in enumerate(classes) if number in one.samples]


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=40),
    seq_len=st.integers(1, 30),
    buckets=st.lists(st.integers(2, 26), min_size=1, max_size=3, unique=True).map(sorted),
    fraction=st.floats(0.05, 0.6),
)
@example(lengths=[8, 2, 2], seq_len=6, buckets=[5], fraction=0.1)  # three documents with as many tokens of a sample
@quick
def test_classes_are_those_counted_token_by_token_in_windows_of_their_own_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, buckets: list[int], fraction: float
) -> None:
    lengths = [*lengths, seq_len + 1, 40]
    whole = corpus_of(tmp_path_factory.mktemp("c"), lengths, seq_len=seq_len)
    document_of = [document for document, length in enumerate(lengths) for _ in range(length)]
    assert classes_of(whole, buckets) == classes_by_hand(document_of, seq_len, buckets)
    head, tail = whole.shards.split_tail(fraction)
    for part, inside in ((head, document_of[: head.token_count]), (tail, document_of[head.token_count :])):
        if part.token_count > seq_len:
            assert classes_of(replace(whole, shards=part), buckets) == classes_by_hand(inside, seq_len, buckets)


def test_a_million_samples_are_classified_each_once(tmp_path: Path) -> None:
    """No loop over samples: that would take longer than a test may."""
    count = 1_000_000 * 4096 + 1
    starts = np.concatenate(([0], np.cumsum(np.random.default_rng(0).geometric(1 / 3000, 1_500_000))))
    manifest = Manifest("uint16", 10, count, ())
    shards = TokenShards(manifest, tmp_path, (), starts[starts < count], None, range(count))
    classes = length_classes(Samples(shards, 4096, 0), rule((1000, 4096), (0.2, 0.2, 0.6)))
    samples = np.sort(np.concatenate([one.samples for one in classes]))
    assert np.array_equal(samples, np.arange(1_000_000))


def rule(buckets: tuple[int, ...], weights: tuple[float, ...]) -> DataConfig:
    return DataConfig(length_buckets=buckets, length_weights=weights)


RULE = rule((20, 50), (0.25, 0.15, 0.6))


@pytest.fixture
def three_lengths(tmp_path: Path) -> Samples:
    """20 samples of short documents, 60 of middle ones, 20 of a long one."""
    return corpus_of(tmp_path / "c", [*[5] * 40, *[30] * 20, 200, 1])


def test_length_classes_have_names_samples_weights(three_lengths: Samples) -> None:
    assert [(one.name, one.samples.tolist(), one.weight) for one in length_classes(three_lengths, RULE)] == [
        ("1 to 19", list(range(20)), 0.25),
        ("20 to 49", list(range(20, 80)), 0.15),
        ("50 and more", list(range(80, 100)), 0.6),
    ]


def test_epoch_of_a_class_has_each_of_its_samples_once(three_lengths: Samples) -> None:
    short, middle, _ = (samples for samples, _ in by_length(three_lengths, RULE))
    assert sorted(short[number] for number in range(20)) == list(range(20))
    assert sorted(middle[number] for number in range(60)) == list(range(20, 80))


def test_epochs_of_a_class_differ_in_order(three_lengths: Samples) -> None:
    short = by_length(three_lengths, RULE)[0][0]
    epochs = [[short[epoch * 20 + number] for number in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("last", [50, 1000])
def test_class_of_no_weight_is_left_out(three_lengths: Samples, last: int) -> None:
    weights = [weight for _, weight in by_length(three_lengths, rule((20, last), (0.5, 0.5, 0.0)))]
    assert weights == [0.5, 0.5]


def test_class_without_samples_is_refused_where_it_has_a_weight(three_lengths: Samples) -> None:
    text = r"document of 1,000 and more tokens, but .*gives such samples 0\.6.*1 to 19: 20; 20 to 999: 80; 1,000 and"
    with pytest.raises(DataError, match=text):
        by_length(three_lengths, rule((20, 1000), (0.2, 0.2, 0.6)))


def test_length_classes_need_an_index_of_documents(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "s", [1, 9] * 50, eod_id=9)
    with pytest.raises(DataError, match="this token set has no index of them"):
        length_classes(Samples(shards, SEQ_LEN, 0), RULE)
