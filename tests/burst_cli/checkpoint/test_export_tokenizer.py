"""`burst checkpoint export`: transformers finds the tokenizer, and in it what begins and ends a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.saved_checkpoints import save_checkpoint
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig

from engine.config.settings import DataConfig, RunConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.runs.folder import RunFolder, create_run

TEXTS = ["the quick brown fox jumps over the lazy dog " * 20]


def make_run(base: Path, tokenizer: str) -> RunFolder:
    config = RunConfig(exp="tiny", data=DataConfig(tokenizer=tokenizer))
    run = create_run(base / "runs/tiny/20260101-000000-aaaaaa", {"config.yaml": dump_config(config)})
    save_checkpoint(run.path / "checkpoints", 1, {"model.norm.weight": np.ones(4, dtype=np.float32)})
    return run


def with_beginning(folder: Path) -> Path:
    """A tokenizer.json in the manner of Llama 3: it puts <|begin|> before every text."""
    train_bpe(TEXTS, 280).save(folder)
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>", "<|turn|>"])
    number = inner.token_to_id("<|begin|>")
    template = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", number)])
    inner.post_processor = Sequence([template])
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def exported(burst: Callable[..., Any], base: Path) -> tuple[Any, dict[str, Any]]:
    result = burst("checkpoint", "export", "aaaaaa", str(base / "out"))
    assert result.code == 0, result.err
    return AutoTokenizer.from_pretrained(base / "out"), json.loads((base / "out/config.json").read_text())


def test_a_tokenizer_that_was_trained_for_the_run_goes_with_its_weights(burst, tmp_path: Path) -> None:
    run = make_run(tmp_path, "bpe")
    train_bpe(TEXTS, 280).save(run.path)  # as rank 0 keeps it there
    tokenizer, config = exported(burst, tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.decode(tokenizer("the quick fox")["input_ids"]) == "the quick fox"
    assert config["eos_token_id"] == GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    assert config["bos_token_id"] is None


def test_beginning_and_end_are_those_of_the_tokenizer_itself(burst, tmp_path: Path) -> None:
    make_run(tmp_path, str(with_beginning(tmp_path)))
    tokenizer, config = exported(burst, tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|endoftext|>")
    assert config["bos_token_id"] == tokenizer.bos_token_id == tokenizer("the")["input_ids"][0]


@pytest.mark.parametrize("spelled", ["<|turn|>", {"content": "<|turn|>", "special": True}])
def test_files_beside_the_tokenizer_have_the_last_word(burst, tmp_path: Path, spelled: Any) -> None:
    make_run(tmp_path, str(with_beginning(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelled, "model_max_length": 9}))
    tokenizer, config = exported(burst, tmp_path)
    assert tokenizer.eos_token == "<|turn|>"
    assert config["eos_token_id"] == [0, tokenizer.eos_token_id]  # the end of documents, and of a turn


@pytest.mark.parametrize("name", ["bytes", "~no such user/tokenizer.json"])
def test_without_a_tokenizer_nothing_is_made_up(burst, tmp_path: Path, name: str) -> None:
    make_run(tmp_path, name)
    assert burst("checkpoint", "export", "aaaaaa", str(tmp_path / "out")).code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
