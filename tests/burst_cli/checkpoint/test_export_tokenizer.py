"""`burst checkpoint export`: transformers finds the tokenizer, and in it what begins and ends a text."""

from __future__ import annotations

import json
import re
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
from engine.runs.folder import create_run

TEXTS = ["the quick brown fox jumps over the lazy dog " * 20]


@pytest.fixture
def export(burst, tmp_path: Path):
    """Export a run with this tokenizer: the folder of the model."""

    def exported(tokenizer: str) -> Path:
        config = RunConfig(exp="tiny", data=DataConfig(tokenizer=tokenizer))
        run = create_run(tmp_path / "runs/tiny/20260101-000000-aaaaaa", {"config.yaml": dump_config(config)})
        save_checkpoint(run.path / "checkpoints", 1, {"model.norm.weight": np.ones(4, dtype=np.float32)})
        if tokenizer == "bpe":
            train_bpe(TEXTS, 280).save(run.path)  # as rank 0 keeps it there
        result = burst("checkpoint", "export", "aaaaaa", str(tmp_path / "out"))
        assert result.code == 0, result.err
        assert re.match(rf"step 1: 1 file of weights, \d+ B, in {tmp_path}/out\n", result.out)
        return tmp_path / "out"

    return exported


def test_a_tokenizer_that_was_trained_for_the_run_goes_with_its_weights(export) -> None:
    folder = export("bpe")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.decode(tokenizer("the quick fox")["input_ids"]) == "the quick fox"
    assert config["eos_token_id"] == GenerationConfig.from_pretrained(folder).eos_token_id == 0
    assert config["bos_token_id"] is None


@pytest.mark.parametrize("spelled", [None, "<|turn|>", {"content": "<|turn|>", "special": True}])
def test_beginning_and_end_are_those_of_the_tokenizer_or_of_the_files_beside_it(
    export, tmp_path: Path, spelled: Any
) -> None:
    """A tokenizer.json in the manner of Llama 3, which puts <|begin|> before every text."""
    train_bpe(TEXTS, 280).save(tmp_path)
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>", "<|turn|>"])
    template = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", inner.token_to_id("<|begin|>"))])
    inner.post_processor = Sequence([template])
    inner.save(str(tmp_path / "tokenizer.json"))
    if spelled is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelled, "model_max_length": 9}))
    folder = export(str(tmp_path / "tokenizer.json"))
    tokenizer, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|turn|>" if spelled else "<|endoftext|>")
    assert config["bos_token_id"] == tokenizer.bos_token_id == tokenizer("the")["input_ids"][0]
    # The end of documents, and of a turn.
    assert config["eos_token_id"] == ([0, tokenizer.eos_token_id] if spelled else tokenizer.eos_token_id)


@pytest.mark.parametrize("name", ["bytes", "~no such user/tokenizer.json"])
def test_without_a_tokenizer_nothing_is_made_up(export, name: str) -> None:
    assert sorted(path.name for path in export(name).iterdir()) == ["config.json", "model.safetensors"]
