"""`burst data show`: what it says is learned is what the training step gets as labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.command_line import Burst

from burst_cli.compose import compose
from engine.data.prepare import open_training_data

PAIRS = [{"q": f"question {n}? ", "a": f"answer {n}."} for n in range(60)]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    fields = [f"data.paths=[{tmp_path}/pairs.jsonl]", "data.text_field=a", "data.prompt_field=q"]
    return ["data", "show", "data=jsonl", *fields, "data.tokenizer=bytes", "train.seq_len=64"]


def test_learned_text_is_that_of_the_answers(words: list[str], burst: Burst) -> None:
    [sample] = burst(*words, "--samples", "1", "--json").document["samples"]
    learned = {at for first, after in sample["learned"] for at in range(first, after)}
    text = bytes(sample["ids"])
    for at in range(1, 65):
        start = text.rfind(b"\xff", 0, at) + 1
        answer = text.find(b"? ", start)
        if start and answer >= 0:  # the document begins in this sample, so its answer can be found by hand
            assert (at in learned) == (at >= answer + 2), f"byte {at} of {text!r}"


def test_samples_are_those_of_the_trainers_batches(words: list[str], burst: Burst) -> None:
    given = ["train.micro_batch_size=2", "train.grad_accum_steps=2", "seed=5", "--step", "2", "--samples", "4"]
    shown = burst(*words, *given, "--json").document["samples"]
    data = open_training_data(compose(words[2:]).config.data)
    sampler = data.sampler(64, 5, grad_accum_steps=2)
    rows = [
        (tokens.tolist(), int((labels >= 0).sum()))
        for micro_step in range(2)
        for batch in [sampler.batch(1, micro_step, 0, 1, 2)]
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
    ]
    assert [(sample["ids"][:64], sample["learned_tokens"]) for sample in shown] == rows


def test_learned_text_is_marked_in_a_pipe(words: list[str], burst: Burst) -> None:
    result = burst(*words, "--samples", "1")
    assert result.code == 0, result.err
    assert "[[answer " in result.out
    assert "question" in result.out.replace("[[", "")


def test_samples_without_labels_are_reported(words: list[str], burst: Burst, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"q": "x" * 500, "a": "y"}) + "\n" for _ in range(9)))
    result = burst(*words, "--samples", "6")
    assert "NO LABELS" in result.out
    assert "of 6 samples have no labels" in result.err


def test_terminal_escapes_of_the_data_do_not_reach_the_terminal(words: list[str], burst: Burst, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"q": "", "a": "\x1b[31mred\r"}) + "\n" for _ in range(40))
    )
    for form in ([], ["--tokens"], ["--json"]):
        out = burst(*words, *form).out
        assert "\x1b" not in out
        assert "\r" not in out


def test_padding_of_validation_is_counted(words: list[str], burst: Burst) -> None:
    shown = burst(*words, "--split", "validation", "--samples", "1", "--json", "train.seq_len=4096").document
    [sample] = shown["samples"]
    assert 0 < sample["padding_tokens"] < 4096
    assert sample["learned_tokens"] < 4096 - sample["padding_tokens"]
