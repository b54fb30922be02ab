"""The comparison of training steps with transformers: what it compares, what it concludes, and a run at tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_step import best_against_checkpointing, main, summarise
from benchmarks.step.variants import Case, enable_checkpointing, llama_config
from engine.config.settings import ModelConfig

TINY = ["--seq-len", "64", "--vocab-size", "256", "--layers", "2", "--heads", "2", "--head-dim", "16", "--threads", "1"]
TILED = "burst:attn_out:tile_tokens=32"
MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, ffn_hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16
)
CASE = Case(MODEL, 100, "float32", 1, "cpu")


def measured(seconds: list[float], peak: int) -> dict[str, Any]:
    return {"seconds": seconds, "losses": [1.0], "peak_tensor_bytes": peak, "peak_resident_bytes": 2 * peak}


def table(**variants: tuple[float, int]) -> dict[str, dict[str, Any]]:
    """Summary of (seconds, peak) by name; double underscores stand for the colon of a policy."""
    named = {name.replace("__", ":"): measured([seconds], peak) for name, (seconds, peak) in variants.items()}
    return summarise(CASE, named)


@pytest.mark.thorough
def test_a_run_compares_equal_work_and_writes_what_it_found(tmp_path: Path) -> None:
    output = tmp_path / "step.json"
    variants = f"{TILED},transformers_checkpoint"
    argv = [*TINY, "--dtype", "float32", "--repeats", "2", "--warmup", "1", "--variants", variants]
    assert main([*argv, "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    ours, theirs = document["results"]
    assert (ours["variant"], theirs["variant"]) == (TILED, "transformers_checkpoint")
    # Same weights, tokens and optimizer: float32 sums in another order differ in the last digits only.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["losses"][2] < ours["losses"][0]
    for row in (ours, theirs):
        assert len(row["seconds"]) == 2
        assert 0 < row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert row["peak_resident_bytes"] > row["peak_tensor_bytes"] > 0
    assert theirs["over_checkpoint"]["time_ratio"] == 1.0
    assert document["best_against_checkpointing"]["variant"] == TILED
    facts = document["environment"]
    assert {"command", "device", "torch", "transformers", "case"} <= facts.keys()
    assert facts["threads"] == 1


def test_transformers_checkpoints_every_layer() -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(CASE)).train()
    enable_checkpointing(model)
    calls = []
    # Before the module: recomputation stops inside it, at the last tensor that backward needs.
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(calls) == 2


def test_ratios_are_taken_to_both_references() -> None:
    rows = table(burst=(2.0, 30), transformers=(4.0, 60), transformers_checkpoint=(5.0, 40))
    assert (rows["burst"]["speed_ratio"], rows["burst"]["tensor_memory_ratio"]) == (2.0, 0.5)
    assert rows["burst"]["over_checkpoint"] == {
        "time_ratio": 0.4,
        "tensor_memory_ratio": 0.75,
        "resident_memory_ratio": 0.75,
    }
    assert rows["burst"]["tokens_per_s"] == 50.0


def test_the_best_is_the_fastest_with_half_the_memory() -> None:
    rows = table(burst=(1.0, 51), burst__full=(3.0, 20), burst__attn_out=(2.0, 50), transformers_checkpoint=(4.0, 100))
    best = best_against_checkpointing(rows)
    assert best is not None
    assert (best["variant"], best["time_ratio"], best["met"]) == ("burst:attn_out", 0.5, True)


def test_a_variant_that_is_small_and_slow_does_not_meet_the_promise() -> None:
    best = best_against_checkpointing(table(burst__full=(3.7, 20), transformers_checkpoint=(4.0, 100)))
    assert best is not None
    assert not best["met"]


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("transformers_fast", "unknown transformers_fast"),
        ("burst:most", "activation_checkpoint"),
        ("burst:attn_out:tile=64", "no such setting"),
    ],
)
def test_unknown_variants_are_refused(variant: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--variants", variant]) == 2
    assert words in capsys.readouterr().err
