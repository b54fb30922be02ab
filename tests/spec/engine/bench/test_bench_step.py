"""The comparison of training steps with transformers: what it compares, what it concludes, and a run at tiny size."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.bench_step import main
from benchmarks.step.variants import Case, enable_checkpointing, llama_config
from engine.config.settings import ModelConfig

TINY = ["--seq-len", "64", "--vocab-size", "256", "--layers", "2", "--heads", "2", "--head-dim", "16", "--threads", "1"]
TILED = "burst:attn_out:tile_tokens=32"
MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, ffn_hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16
)
CASE = Case(MODEL, 100, "float32", 1, "cpu")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document that a tiny run with one variant of each library wrote."""
    output = tmp_path_factory.mktemp("bench") / "step.json"
    variants = f"{TILED},transformers_checkpoint"
    argv = [*TINY, "--dtype", "float32", "--repeats", "2", "--warmup", "1", "--variants", variants]
    assert main([*argv, "--output", str(output)]) == 0
    document: dict[str, Any] = json.loads(output.read_text())
    assert [row["variant"] for row in document["results"]] == [TILED, "transformers_checkpoint"]
    return document


@pytest.mark.thorough
def test_both_libraries_train_the_same_model(comparison: dict[str, Any]) -> None:
    ours, theirs = comparison["results"]
    # Same weights, tokens and optimizer: float32 sums in another order differ in the last digits only.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["losses"][2] < ours["losses"][0]


@pytest.mark.thorough
def test_every_variant_has_times_with_memory_peaks(comparison: dict[str, Any]) -> None:
    for row in comparison["results"]:
        assert len(row["seconds"]) == 2
        assert 0 < row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert row["peak_resident_bytes"] > row["peak_tensor_bytes"] > 0


@pytest.mark.thorough
def test_variants_are_compared_with_checkpointing(comparison: dict[str, Any]) -> None:
    theirs = comparison["results"][1]
    assert theirs["over_checkpoint"]["time_ratio"] == 1.0
    assert comparison["best_against_checkpointing"]["variant"] == TILED


@pytest.mark.thorough
def test_the_environment_is_recorded(comparison: dict[str, Any]) -> None:
    facts = comparison["environment"]
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
