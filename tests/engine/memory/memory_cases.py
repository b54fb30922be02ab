"""Configurations that the memory tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
FOURTEEN_B = replace(
    SEVEN_B,
    name="14b",
    vocab_size=120000,
    hidden_size=5120,
    ffn_hidden_size=13824,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
)


def seven_b(**changes: dict[str, Any]) -> RunConfig:
    """Llama-2-7B on 2 million tokens, burst attention; `changes` by section."""
    base = replace(RunConfig(), model=SEVEN_B)
    settings: dict[str, dict[str, Any]] = {"attention": {"preset": "burst"}, "train": {"seq_len": 2**21}}
    for section, fields in changes.items():
        settings[section] = {**settings.get(section, {}), **fields}
    return replace(base, **{name: replace(getattr(base, name), **fields) for name, fields in settings.items()})


def prediction_of(device_bytes: int, host_bytes: int = 0) -> MemoryPrediction:
    """A prediction that says so."""
    return MemoryPrediction(
        "cuda", 8, 0, device_bytes, host_bytes, "backward", {"device": {}, "host": {}}, {}, reserve_bytes=0, seconds=0.0
    )
