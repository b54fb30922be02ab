"""Words and numbers of other trainers, and what is said of them."""

from __future__ import annotations

import re

import pytest

from engine.config.hints import SYNONYMS, meant_value
from engine.config.schema import known_keys, tokens_of, unknown_key
from engine.config.settings import RunConfig

KEYS = known_keys(RunConfig)


def test_hints_name_settings_that_exist() -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    named = {word for hint in SYNONYMS.values() for word in re.findall(r"[a-z]+(?:\.[a-z_0-9]+)+", hint)}
    named = {word for word in named if word.partition(".")[0] in sections}
    assert named
    assert named - set(KEYS) == set()


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("lr", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("epochs", "train.steps"),
        ("num_train_epochs", "train.steps"),
        ("parallel.tp", "parallel.tp_size"),
        ("parallel.dp", "parallel.dp_shard_size"),
        ("wandb.project", "train.tensorboard"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("gradient_accumulation_steps", "train.grad_accum_steps"),
        ("max_seq_length", "train.seq_len"),
        ("learning_rate", "optimizer.learning_rate"),
        ("bf16", "train.compute_dtype"),
        ("deepspeed", "parallel.dp_shard_size"),
        ("cp_size", "parallel.cp_size"),
        ("context-parallel-size", "parallel.cp_size"),
        ("seqlen", "train.seq_len"),
    ],
)
def test_a_setting_of_another_trainer_gets_the_name_used_here(key: str, setting: str) -> None:
    assert setting in unknown_key(key, KEYS).text


@pytest.mark.parametrize(
    ("text", "expected", "unit", "meant"),
    [
        ("2k", "a whole number", "steps", "2000"),
        ("0100", "a whole number", None, "100 (or 64, if the 0 was to make it octal)"),
        ("0x10", "a whole number", None, "16"),
        ("1,000", "a whole number", None, "1000"),
        ("80GiB", "a whole number or null", "bytes", "85899345920"),
        ("12:00", "a number", "seconds", "720, in seconds"),
        ("off", "true or false", None, "false"),
        ("128KB", "a whole number", "tokens", "128K"),
        ("many", "a whole number", None, None),
        ("no", "text", None, None),
    ],
)
def test_a_misspelt_value_gets_a_suggestion(text: str, expected: str, unit: str | None, meant: str | None) -> None:
    assert meant_value(text, expected, unit) == meant


@pytest.mark.parametrize(("text", "tokens"), [("2k", 2048), ("128K", 131072), ("1M", 1048576), ("1.5m", 1572864)])
def test_tokens_are_counted_in_binary_thousands_in_either_case(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens
