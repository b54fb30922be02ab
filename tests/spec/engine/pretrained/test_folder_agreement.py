"""Facts of a folder that training would contradict are refused before ranks start. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.config.errors import ConfigError
from engine.config.settings import DataConfig, ModelConfig, RunConfig
from engine.data.agreement import tokenizer_problem, vocabulary_problem
from engine.data.tokenizers import train_bpe
from engine.pretrained.names import EMBEDDING, HEAD, check_tied_head, weight_files


def tokenizer_folder(folder: Path, text: str = "hello there world ") -> Path:
    folder.mkdir(parents=True)
    train_bpe([text * 20], 300).save(folder)
    return folder


def run_of(folder: Path, tokenizer: str, **data: object) -> RunConfig:
    return RunConfig(model=ModelConfig(init_from=str(folder)), data=DataConfig(tokenizer=tokenizer, **data))


def test_bytes_are_not_the_ids_of_a_folder(tmp_path: Path) -> None:
    problem = tokenizer_problem(run_of(tokenizer_folder(tmp_path / "base"), "bytes"))
    assert problem is not None
    assert f"set data.tokenizer={tmp_path}/base" in problem


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    base, other = tokenizer_folder(tmp_path / "base"), tokenizer_folder(tmp_path / "other", "quite another text ")
    problem = tokenizer_problem(run_of(base, str(other)))
    assert problem is not None
    assert "give the same text other ids" in problem


def test_shards_with_another_tokenizer_are_refused(tmp_path: Path) -> None:
    base, other = tokenizer_folder(tmp_path / "base"), tokenizer_folder(tmp_path / "other", "quite another text ")
    assert tokenizer_problem(run_of(base, "bytes", format="shards", paths=(str(other),))) is not None


def test_a_copy_of_the_tokenizer_is_taken(tmp_path: Path) -> None:
    base = tokenizer_folder(tmp_path / "base")
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    assert tokenizer_problem(run_of(base, str(copy))) is None


def test_a_folder_without_a_tokenizer_is_compared_with_nothing(tmp_path: Path) -> None:
    assert tokenizer_problem(run_of(tmp_path, "bytes")) is None


def test_more_ids_than_rows_of_a_folder_have_a_remedy_that_init_from_takes() -> None:
    problem = vocabulary_problem(RunConfig(model=ModelConfig(vocab_size=64, init_from="/m")), 70)
    assert problem is not None
    assert "resize_token_embeddings" in problem
    assert "set model.vocab_size" not in problem


@pytest.mark.parametrize("other", ["same", "last number", "shorter"])
def test_a_head_beside_tied_embeddings_is_compared(tmp_path: Path, other: str) -> None:
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    head = weight[:5].copy() if other == "shorter" else weight.copy()
    if other == "last number":
        head[-1, -1] += 1
    save_file({EMBEDDING: weight, HEAD: head}, tmp_path / "model.safetensors")
    if other == "same":
        check_tied_head(weight_files(tmp_path))
    else:
        with pytest.raises(ConfigError, match=r"lm_head\.weight differs from .*set tie_word_embeddings to false"):
            check_tied_head(weight_files(tmp_path))


def test_numbers_of_different_formats_are_compared_by_value(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({EMBEDDING: weight, HEAD: weight.astype(np.float16)}, tmp_path / "model.safetensors")
    check_tied_head(weight_files(tmp_path))
