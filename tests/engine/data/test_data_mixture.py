"""Several token sets by weight, each divided by length or read twice: exact shares, independent of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import make_shards
from testkit.corpora import text_corpus

from engine.config.errors import DataError
from engine.config.settings import DataConfig
from engine.data.prepare import open_training_data, prepare
from engine.data.sampler import BLOCK, Sampler, Samples

SEQ_LEN = 10


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
    ],
)
def test_shares_are_those_of_the_weights_and_nobody_gets_none(
    sources: list[Samples], weights: tuple[float, ...], expected: list[int]
) -> None:
    assert sorted(Sampler(sources[: len(weights)], weights).shares, reverse=True) == expected


def test_of_every_block_each_set_has_its_share(sources: list[Samples]) -> None:
    mixed = Sampler(sources, (0.7, 0.2, 0.1), seed=1)
    starts = [sample.shards.read(0, 1)[0] for sample in sources]
    for block in range(2):
        places = [mixed.place_of(block * BLOCK + position) for position in range(BLOCK)]
        drawn = np.array([int(shards.folder.name) for shards, _ in places])
        for samples, start, share in zip(sources, starts, (7000, 2000, 1000), strict=True):
            own = [places[position][1] for position in np.flatnonzero(drawn == start)]
            expected = [samples[number] for number in range(block * share, (block + 1) * share)]
            assert sorted(own) == sorted(expected)  # those that come next in its own order
            assert abs((drawn[:1000] == start).mean() - share / BLOCK) < 0.06  # and early in it about as many


def test_a_batch_holds_rows_of_several_sets_whole(sources: list[Samples]) -> None:
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


def test_what_changes_the_samples_changes_the_hash_and_nothing_that_is_prepared(tmp_path: Path) -> None:
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


def test_echoed_the_second_half_of_every_sample_repeats_the_first(tmp_path: Path) -> None:
    config = prepared(tmp_path, "a")
    batch = open_training_data(replace(config, echo_tokens=16)).sampler(32, 0, grad_accum_steps=1).batch(0, 0, 0, 1, 4)
    np.testing.assert_array_equal(batch.tokens[:, :16], batch.tokens[:, 16:])
    np.testing.assert_array_equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert all(starts.tolist() == [0] for starts in batch.documents)
