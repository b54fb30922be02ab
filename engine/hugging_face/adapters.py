"""Low-rank adapters on a decoder of transformers, by the library peft: LoRA, DoRA, and on the parameters of experts.

peft replaces the chosen modules inside the decoder layers by ones that hold the frozen weight as `base_layer` and the
adapter beside it. Only the adapters need gradients, have optimizer states and are in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.config.errors import ConfigError
from engine.config.model_parts import LoraConfig
from engine.hugging_face.initial import written_values
from engine.model.decoder import Initial

ADAPTER = "default"  # peft's name for the only one
_BASE = ".base_layer"
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"


def add_adapters(model: Any, config: LoraConfig) -> dict[str, Initial | str]:
    """Add adapters to a transformers model on the meta device, freeze all else, and return their initial values.

    Raises:
        ConfigError: peft is missing, or cannot put adapters there.
    """
    peft = _import_peft()
    modules: Any = list(config.target_modules)
    stated = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=modules[0] if modules == ["all-linear"] else modules,
        target_parameters=list(config.target_parameters) or None,
        use_dora=config.dora,
        task_type="CAUSAL_LM",
    )

    def inject() -> None:
        with torch.device("meta"):
            peft.inject_adapter_in_model(stated, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)

    try:
        initial = written_values(model, inject)
    except Exception as error:  # whatever peft raises for a model or a target that it does not take
        raise ConfigError(f"model.lora: peft {peft.__version__} cannot add adapters: {error}") from error
    adapters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    outside = sorted(name for name in adapters if not _is_in_layer(name, model))
    if outside:
        raise ConfigError(f"model.lora: {outside[0]} is outside of the decoder layers; choose other targets")
    return {name: Initial(1.0, 0.0) if name.endswith(_MAGNITUDE) else initial[name] for name in adapters}


def is_adapter(name: str) -> bool:
    """Return whether a parameter is one of an adapter, by its name."""
    return f".{ADAPTER}." in name and ".lora_" in name


def base_name(name: str) -> str:
    """Return the name that a frozen parameter has in the model without adapters."""
    return name.replace(_BASE, "")


@torch.no_grad()
def derive_magnitudes(decoder: nn.Module) -> None:
    """Set the magnitudes of DoRA to the lengths of the rows of the frozen weights, of this rank's shards.

    The adapters are 0 at first. Magnitudes [out] and weights [out, in] have the same shards of dimension 0.

    Raises:
        ConfigError: A module's weight is not [out, in].
    """
    for name, module in decoder.named_modules():
        magnitudes = getattr(module, "lora_magnitude_vector", None)
        if not magnitudes:
            continue
        base: Any = module.base_layer
        if not isinstance(base, nn.Linear):
            raise ConfigError(f"model.lora.dora: {name} is a {type(base).__name__}, expected a linear layer")
        target, weight = (_local(x) for x in (magnitudes[ADAPTER].weight, base.weight))
        target.copy_(weight.norm(dim=1))


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _is_in_layer(name: str, model: Any) -> bool:
    return name.startswith(f"{model.base_model_prefix}.") and any(part.isdigit() for part in name.split("."))


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs the library peft on every rank: pip install peft") from error
    return peft
