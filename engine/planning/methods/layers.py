"""The mask and the method of each layer of a model. No torch.

All layers share one layout, because tokens are sharded once. Masks, the operand that moves in backward and what is
saved for backward may differ:

    mask_layers=[window,window,window,causal]     layers 0 1 2 windowed, 3 causal, 4 5 6 windowed, 7 causal, ...

Layers with the mask no_attention are linear: nothing is planned for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.config.settings import MaskKind, RunConfig
from engine.planning.checkpoint_policy import checkpoint_kinds, recompute_cut
from engine.planning.methods.presets import AttentionMethod
from engine.planning.visibility.mask import Mask
from engine.planning.visibility.patterns import build_mask


class AttendedPairs(NamedTuple):
    """Visible (query, key) pairs per head: of a forward pass, and those attended again in backward."""

    visible: int
    again: int


@dataclass(frozen=True)
class LayerAttention:
    """One layer's mask and method.

    recompute_before   attention of queries before this position is recomputed in backward (0: none, the padded length:
                       all); None: the layer saves all that its backward needs
    """

    mask: Mask
    method: AttentionMethod
    recompute_before: int | None = None

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return not self.mask.hides_all

    @property
    def pairs(self) -> AttendedPairs:
        """Of one sequence, over all ranks; exact."""
        return _pairs(self.mask, min(self.recompute_before or 0, self.mask.seq_len))


@lru_cache(maxsize=32)  # a search over policies repeats the same arguments
def _pairs(mask: Mask, recompute_before: int) -> AttendedPairs:
    visible, again = mask.pairs_before(np.array([mask.seq_len, recompute_before]))
    return AttendedPairs(int(visible), int(again))


def attended_pairs(layers: Sequence[LayerAttention], num_layers: int, *, sequences: int = 1) -> AttendedPairs:
    """Return the pairs of all layers and `sequences` equal sequences, over all ranks; `layers`: the pattern."""
    found = [layers[index % len(layers)].pairs for index in range(num_layers)]
    return AttendedPairs(*(sequences * sum(counts) for counts in zip(*found, strict=True)))


@dataclass(frozen=True)
class LayerPattern:
    """One of the layers that repeat: the name of its mask, and `recompute_before` as in `LayerAttention`."""

    mask: MaskKind
    recompute_before: int | None = None


def layer_pattern(config: RunConfig, method: AttentionMethod) -> tuple[LayerPattern, ...]:
    """The layers that repeat: layer i of a model is number i modulo their count."""
    kinds = config.attention.mask_layers or (config.attention.mask,)
    policies = checkpoint_kinds(config.memory)
    cuts = {policy: recompute_cut(policy, config, method.cp_size) for policy in set(policies)}
    pairs = [(kinds[i % len(kinds)], policies[i % len(policies)]) for i in range(math.lcm(len(kinds), len(policies)))]
    return tuple(LayerPattern(kind, None if kind == "no_attention" else cuts[policy]) for kind, policy in pairs)


def build_layers(
    pattern: Sequence[LayerPattern], config: RunConfig, method: AttentionMethod, documents: Sequence[int] = ()
) -> tuple[LayerAttention, ...]:
    """The layers of a pattern with their masks over a sequence of the run. Raises ConfigError for a bad mask.

    Args:
        pattern: of the layers that repeat.
        config: length of the sequence, options of the masks.
        method: attention of all layers.
        documents: start positions of packed documents that no attention crosses, or nothing.
    """
    attention, seq_len = config.attention, config.train.seq_len
    masks = {kind: build_mask(kind, seq_len, attention, documents) for kind in {layer.mask for layer in pattern}}
    return tuple(LayerAttention(masks[layer.mask], method, layer.recompute_before) for layer in pattern)


def attention_layers(
    config: RunConfig, method: AttentionMethod, documents: Sequence[int] = ()
) -> tuple[LayerAttention, ...]:
    """Return `build_layers` for the `layer_pattern` of the run."""
    return build_layers(layer_pattern(config, method), config, method, documents)
