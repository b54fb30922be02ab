"""Configurations that differ from a given one in some settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config.settings import ModelConfig

LLAMA_7B = ModelConfig(
    name="7b",
    vocab_size=32000,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
)


def changed(base: Any, **changes: Any) -> Any:
    """A dataclass with other fields; a dict changes only its keys in what the field holds."""
    fields = {
        name: changed(getattr(base, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return replace(base, **fields)
