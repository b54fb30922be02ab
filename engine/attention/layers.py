"""What each layer of a model does: its mask and its method. No torch.

All layers share one layout, because tokens are sharded once; masks, what circulates in backward and what is kept for
it may differ:

    mask_layers=[window,window,window,causal]     layers 0 1 2 windowed, 3 causal, 4 5 6 windowed, 7 causal, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.attention.lengths import checkpoint_kinds, recompute_cut
from engine.attention.mask import Mask
from engine.attention.patterns import REQUIRED_OPTIONS, MaskOptions, build_mask
from engine.attention.presets import AttentionMethod
from engine.config import AttentionConfig, MaskKind, RunConfig

DEFAULT_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class LayerAttention:
    """One layer's mask and method.

    recompute_before   queries at positions before this one are attended again in backward (0: none, the padded length:
                       all); None: the layer keeps all that its backward needs
    """

    mask: Mask
    method: AttentionMethod
    recompute_before: int | None = None


def attention_layers(
    config: RunConfig, method: AttentionMethod, documents: Sequence[int] = ()
) -> tuple[LayerAttention, ...]:
    """The layers in turn; layer i of a model is number i modulo their count. Raises ConfigError for a bad mask.

    `documents`: start positions of packed documents that no attention crosses, or nothing.
    """
    attention, seq_len = config.attention, config.train.seq_len
    kinds = attention.mask_layers or (attention.mask,)
    masks = {kind: build_mask(kind, seq_len, mask_options(attention, kind), documents) for kind in set(kinds)}
    circulates = attention.circulates_layers or (method.backward_circulates,)
    policies = checkpoint_kinds(config.memory)
    methods = {choice: replace(method, backward_circulates=choice) for choice in set(circulates)}
    cuts = {policy: recompute_cut(policy, config, method.cp_size) for policy in set(policies)}
    return tuple(
        LayerAttention(
            masks[kinds[i % len(kinds)]], methods[circulates[i % len(circulates)]], cuts[policies[i % len(policies)]]
        )
        for i in range(math.lcm(len(kinds), len(circulates), len(policies)))
    )


def mask_options(attention: AttentionConfig, kind: MaskKind) -> MaskOptions:
    """The settings that a kind of mask reads, without those of other kinds."""
    options: dict[str, Any] = {name: getattr(attention, name) for name in REQUIRED_OPTIONS[kind]}
    if "block_tokens" in options:
        options["block_tokens"] = attention.block_tokens or DEFAULT_BLOCK_TOKENS
    elif kind == "blocks":
        options["block_tokens"] = attention.block_tokens
    return MaskOptions(**options)
