"""Several token sets by weight: exact shares, every set in its own order, independent of ranks."""

from __future__ import annotations

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
from engine.data.sampler import BLOCK, Sampler, Samples, shares

SEQ_LEN = 10


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Samples]:
    """Three sets, whose tokens say where they come from: 0 to 999, 1000 to 1499, 1500 to 1519."""
    folder = tmp_path_factory.mktemp("sets")
    ranges = (range(1000), range(1000, 1500), range(1500, 1520))
    sets = [make_shards(folder / str(ids.start), list(ids), vocab_size=1520) for ids in ranges]
    return [Samples(one, SEQ_LEN, 5) for one in sets]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0,), [BLOCK]),
        ((1.0, 1.0, 1.0), [3334, 3333, 3333]),
        ((0.7, 0.2, 0.1), [7000, 2000, 1000]),
        ((1e9, 1.0, 1e-9), [BLOCK - 2, 1, 1]),
        ((3.0, 1.0), [7500, 2500]),
    ],
)
def test_shares_are_those_of_the_weights_and_nobody_gets_none(weights: tuple[float, ...], expected: list[int]) -> None:
    assert sum(shares(weights)) == BLOCK
    assert sorted(shares(weights), reverse=True) == expected


def test_of_every_block_each_set_has_its_share(sources: list[Samples]) -> None:
    mixed = Sampler(sources, (0.7, 0.2, 0.1), 1)
    for block in range(3):
        found = [mixed.source_of(block * BLOCK + position) for position in range(BLOCK)]
        drawn = [source for source, _ in found]
        assert np.bincount(drawn).tolist() == mixed.shares
        for source, share in enumerate(mixed.shares):  # and of each the samples that come next, in some order
            own = sorted(number for of, number in found if of == source)
            assert own == list(range(block * share, (block + 1) * share))
        first = np.bincount(drawn[:1000], minlength=3) / 1000  # and early in it about as much
        assert abs(first - [0.7, 0.2, 0.1]).max() < 0.06


def test_a_batch_holds_rows_of_several_sets_whole(sources: list[Samples]) -> None:
    mixed = Sampler(sources, (1.0, 1.0, 1.0), 1)
    batch = mixed.batch(0, 0, 0, 1, 64)
    # As it always was: runs that resume rely on it.
    assert batch.tokens[:9, 0].tolist() == [1500, 1450, 1000, 1420, 1460, 1420, 1500, 1500, 1110]
    assert {int(row[0]) // 500 for row in batch.tokens} >= {0, 2, 3}
    assert (np.diff(batch.tokens, axis=1) == 1).all()
    assert (batch.labels == batch.tokens + 1).all()


def prepared(tmp_path: Path, name: str, text: str, **settings: Any) -> DataConfig:
    config = text_corpus(tmp_path / name, text, validation_fraction=0.2, **settings)
    prepare(config)
    return config


def test_prepared_corpora_are_mixed(tmp_path: Path) -> None:
    main = prepared(tmp_path, "main", "all work and no play makes jack a dull boy\n" * 200)
    prepared(tmp_path, "other", "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG\n" * 200)
    config = replace(main, mix_paths=(str(tmp_path / "other" / "prepared"),), mix_weights=(1.0, 3.0))
    data = open_training_data(config)
    batch = data.sampler(40, 0, grad_accum_steps=1).batch(0, 0, 0, 1, 400)
    shouted = [bytes(row[row < 256].astype(np.uint8)).isupper() for row in batch.tokens]
    assert 0.65 < np.mean(shouted) < 0.85
    alone = open_training_data(main)
    assert alone.content_hash == alone.main.content_hash != data.content_hash
    assert open_training_data(replace(config, mix_weights=(1.0, 2.0))).content_hash != data.content_hash
    prepared(tmp_path, "bpe", "the quick brown fox\n" * 400, tokenizer="bpe", bpe_vocab_size=300)
    with pytest.raises(DataError, match=r"Prepare both with the same data\.tokenizer"):
        open_training_data(replace(config, mix_paths=(str(tmp_path / "bpe" / "prepared"),)))
