"""Configurations that the memory tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config.settings import RunConfig
from engine.planning.topology import Topology
from engine.predict.memory import MemoryPrediction
from testkit.sections import LLAMA_7B, changed

WORLD = Topology(1, 8)
EIGHT_B = replace(LLAMA_7B, name="8b", vocab_size=128256, ffn_hidden_size=14336, num_kv_heads=8)


def seven_b(**changes: dict[str, Any]) -> RunConfig:
    """Llama-2-7B on 2 million tokens, burst attention; `changes` by section."""
    base = changed(RunConfig(), model=LLAMA_7B, attention={"preset": "burst"}, train={"seq_len": 2**21})
    return changed(base, **changes)


def prediction_of(device_bytes: int, host_bytes: int = 0) -> MemoryPrediction:
    """A prediction that says so."""
    return MemoryPrediction(
        "cuda", 8, 0, device_bytes, host_bytes, "backward", {"device": {}, "host": {}}, {}, reserve_bytes=0, seconds=0.0
    )
