"""Text that is read twice in a row, against doing it by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_helpers import make_shards, quick
from hypothesis import given
from hypothesis import strategies as st
from testkit.corpora import text_corpus

from engine.config.settings import DataConfig
from engine.data.prepare import open_prepared, open_training_data, prepare
from engine.data.shards import EchoedShards


@given(count=st.integers(1, 60), piece=st.integers(1, 9), data=st.data())
@quick
def test_every_piece_comes_twice(
    tmp_path_factory: pytest.TempPathFactory, count: int, piece: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("text")
    prompts = np.array([[start, start + 1] for start in range(0, count, 3)], dtype="<i8")  # every third
    prompts.tofile(folder / "p.bin")
    text = make_shards(folder, range(count), prompts_file="p.bin", prompt_count=len(prompts))
    shards = EchoedShards(text, piece)
    pieces = [list(range(first, first + piece)) for first in range(0, count - piece + 1, piece)]
    expected = np.array([token for one in pieces for token in one + one], dtype=np.int64)
    assert shards.token_count == expected.size
    start = data.draw(st.integers(0, expected.size))
    length = data.draw(st.integers(0, expected.size - start))
    np.testing.assert_array_equal(shards.read(start, length), expected[start : start + length])
    np.testing.assert_array_equal(shards.is_prompt(start, length), expected[start : start + length] % 3 == 0)
    with pytest.raises(IndexError):
        shards.read(start, expected.size - start + 1)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return text_corpus(tmp_path, "".join(chr(97 + i * i % 26) for i in range(3000)), validation_fraction=0.3)


def test_the_second_half_of_every_sample_repeats_the_first(config: DataConfig) -> None:
    prepare(config)
    echo = open_training_data(replace(config, echo_tokens=16))
    batch = echo.sampler(32, 0, grad_accum_steps=1).batch(0, 0, 0, 1, 4)
    np.testing.assert_array_equal(batch.tokens[:, :16], batch.tokens[:, 16:])
    np.testing.assert_array_equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert all(starts.tolist() == [0] for starts in batch.documents)
    plain = open_prepared(config)
    np.testing.assert_array_equal(echo.main.validation.read(0, 16), plain.validation.read(0, 16))
    assert echo.content_hash != open_training_data(config).content_hash
