"""Samples in classes by the length of their documents: who is in which, exact shares, the same on all ranks."""

from __future__ import annotations

import time
from collections import Counter
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from data_helpers import make_shards, quick
from hypothesis import example, given
from hypothesis import strategies as st

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.manifest import Manifest
from engine.data.sampler import Samples, by_length, length_classes
from engine.data.shards import TokenShards

SEQ_LEN = 10


def corpus_of(folder: Path, lengths: list[int], *, seq_len: int = SEQ_LEN) -> Samples:
    """Documents of these lengths; token i of the whole is i."""
    shards = make_shards(folder, range(sum(lengths)), [0, *accumulate(lengths[:-1])], vocab_size=sum(lengths))
    return Samples(shards, seq_len, 5)


def class_by_hand(document_of: list[int], sample: int, seq_len: int, buckets: list[int]) -> int:
    """Counts every token of the sample one by one."""
    counts = Counter(document_of[sample * seq_len : (sample + 1) * seq_len])
    most = max(counts.values())
    document = min(document for document, count in counts.items() if count == most)
    return sum(document_of.count(document) >= bucket for bucket in buckets)


def classes_of(corpus: Samples, buckets: list[int]) -> list[int]:
    """The class of every sample."""
    classes = length_classes(corpus, rule(tuple(buckets), (0.0,) * (len(buckets) + 1)))
    return [index for number in range(corpus.per_epoch) for index, one in enumerate(classes) if number in one.samples]


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=40),
    seq_len=st.integers(1, 30),
    buckets=st.lists(st.integers(2, 26), min_size=1, max_size=3, unique=True).map(sorted),
)
@example(lengths=[8, 2, 2], seq_len=6, buckets=[5])  # three documents with as many tokens of a sample
@quick
def test_classes_are_those_counted_token_by_token(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, buckets: list[int]
) -> None:
    lengths = [*lengths, seq_len + 1]
    corpus = corpus_of(tmp_path_factory.mktemp("c"), lengths, seq_len=seq_len)
    document_of = [document for document, length in enumerate(lengths) for _ in range(length)]
    expected = [class_by_hand(document_of, sample, seq_len, buckets) for sample in range(corpus.per_epoch)]
    assert classes_of(corpus, buckets) == expected


@given(lengths=st.lists(st.integers(1, 25), min_size=3, max_size=30), fraction=st.floats(0.05, 0.6))
@quick
def test_classes_of_a_window_are_those_of_its_own_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], fraction: float
) -> None:
    whole = corpus_of(tmp_path_factory.mktemp("c"), [*lengths, 40, 40]).shards
    head, tail = whole.split_tail(fraction)
    for part, start in ((head, 0), (tail, head.token_count)):
        inside = range(start, start + part.token_count)
        edges = [0, *accumulate([*lengths, 40, 40])]
        document_of = [sum(edge <= position for edge in edges) for position in inside]
        if part.token_count > 5:
            corpus = Samples(part, 5, 0)
            expected = [class_by_hand(document_of, sample, 5, [9, 20]) for sample in range(corpus.per_epoch)]
            assert classes_of(corpus, [9, 20]) == expected


def test_a_million_samples_are_classified_in_about_a_second(tmp_path: Path) -> None:
    count = 1_000_000 * 4096 + 1
    starts = np.concatenate(([0], np.cumsum(np.random.default_rng(0).geometric(1 / 3000, 1_500_000))))
    manifest = Manifest("uint16", 10, count, ())
    shards = TokenShards(manifest, tmp_path, (), starts[starts < count], None, range(count))
    begin_s = time.process_time()
    classes = length_classes(Samples(shards, 4096, 0), rule((1000, 4096), (0.2, 0.2, 0.6)))
    # 0.3 s of one core at leisure; ten times that is still no loop over samples.
    assert time.process_time() - begin_s < 3
    assert min(one.samples.size for one in classes) > 0


def rule(buckets: tuple[int, ...], weights: tuple[float, ...]) -> DataConfig:
    return DataConfig(length_buckets=buckets, length_weights=weights)


RULE = rule((20, 50), (0.25, 0.15, 0.6))
LENGTHS = [5] * 40 + [30] * 20 + [200]  # 20 samples of short documents, 60 of middle ones, 20 of a long one


@pytest.fixture
def corpus(tmp_path: Path) -> Samples:
    return corpus_of(tmp_path / "c", [*LENGTHS, 1])


def test_within_a_class_every_sample_comes_once_per_epoch_in_another_order(corpus: Samples) -> None:
    short, middle, _ = (samples for samples, _ in by_length(corpus, RULE))
    epochs = [[short[epoch * 20 + number] for number in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(middle[number] for number in range(60)) == list(range(20, 80))


def test_a_class_of_no_weight_is_left_out_and_one_without_samples_is_an_error(corpus: Samples, tmp_path: Path) -> None:
    assert [weight for _, weight in by_length(corpus, rule((20, 50), (0.5, 0.5, 0.0)))] == [0.5, 0.5]
    assert len(by_length(corpus, rule((20, 1000), (0.5, 0.5, 0.0)))) == 2  # none is wanted of 1,000 tokens
    text = r"document of 1,000 and more tokens, but .*gives such samples 0\.6.*1 to 19: 20; 20 to 999: 80; 1,000 and"
    with pytest.raises(DataError, match=text):
        by_length(corpus, rule((20, 1000), (0.2, 0.2, 0.6)))
    shards = make_shards(tmp_path / "s", [1, 9] * 50, eod_id=9)
    with pytest.raises(DataError, match="this token set has no index of them"):
        length_classes(Samples(shards, SEQ_LEN, 0), RULE)


def test_classes_have_names_samples_and_weights(corpus: Samples) -> None:
    classes = length_classes(corpus, RULE)
    assert [(one.name, one.samples.tolist(), one.weight) for one in classes] == [
        ("1 to 19", list(range(20)), 0.25),
        ("20 to 49", list(range(20, 80)), 0.15),
        ("50 and more", list(range(80, 100)), 0.6),
    ]
