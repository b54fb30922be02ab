"""Adapters as the library peft reads them: the names of their weights, and adapter_config.json. No torch, no peft."""

from __future__ import annotations

from typing import Any

from engine.config.settings import ModelConfig

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector.weight"


def adapter_name(name: str) -> str:
    """Return the name in peft's file of an adapter's parameter in the trainer: without the name of the adapter."""
    outer = _PREFIX + name.replace(".default.", ".")
    return outer.removesuffix(".weight") if outer.endswith(_MAGNITUDE) else outer


def adapter_config(model: ModelConfig) -> dict[str, Any]:
    """Return adapter_config.json of a model's adapters; what it leaves out has peft's defaults."""
    lora = model.lora
    modules = list(lora.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.init_from,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules[0] if modules == ["all-linear"] else modules,
        "target_parameters": list(lora.target_parameters) or None,
        "use_dora": lora.dora,
        "inference_mode": True,
    }
