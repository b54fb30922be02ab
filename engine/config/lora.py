"""Settings of low-rank adapters. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.schema import setting


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al. 2021), by the library peft; needs model.implementation=hf."""

    rank: int | None = setting(None, "rank of the adapters, which alone are trained; null: all weights are", at_least=1)
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank", above=0)
    target_modules: tuple[str, ...] = setting(
        ("all-linear",), "names, or ends of names, of the linear layers with an adapter; all-linear: all but the head"
    )
    target_parameters: tuple[str, ...] = setting(
        (), "likewise of parameters without a linear layer of their own: experts, such as mlp.experts.gate_up_proj"
    )
    dora: bool = setting(False, "train the length of every output's weights on its own (Liu et al. 2024)")
