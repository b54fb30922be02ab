"""Configurations that the memory tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from testkit.sections import changed

from engine.config.settings import ModelConfig, RunConfig
from engine.planning.memory.predictor import MemoryPrediction
from engine.planning.methods.topology import Topology

WORLD = Topology(1, 8)
SEVEN_B = ModelConfig(
    name="7b",
    vocab_size=32000,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
)
EIGHT_B = replace(SEVEN_B, name="8b", vocab_size=128256, ffn_hidden_size=14336, num_kv_heads=8)


def seven_b(**changes: dict[str, Any]) -> RunConfig:
    """Llama-2-7B on 2 million tokens, burst attention; `changes` by section."""
    base = changed(RunConfig(), model=SEVEN_B, attention={"preset": "burst"}, train={"seq_len": 2**21})
    return changed(base, **changes)


def prediction_of(device_bytes: int, host_bytes: int = 0) -> MemoryPrediction:
    """A prediction that says so."""
    return MemoryPrediction(
        "cuda", 8, 0, device_bytes, host_bytes, "backward", {"device": {}, "host": {}}, {}, reserve_bytes=0, seconds=0.0
    )
