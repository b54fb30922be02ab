"""What each layer of a model does: its mask and its method. No torch.

All layers share one layout, because tokens are sharded once; masks, what circulates in backward and what is kept for
it may differ:

    mask_layers=[window,window,window,causal]     layers 0 1 2 windowed, 3 causal, 4 5 6 windowed, 7 causal, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.sequence.lengths import checkpoint_kinds, recompute_cut
from engine.planning.sequence.mask import Mask
from engine.planning.sequence.patterns import build_mask


class AttendedPairs(NamedTuple):
    """Visible (query, key) pairs per head: of a forward pass, and those attended again in backward."""

    visible: int
    again: int


@dataclass(frozen=True)
class LayerAttention:
    """One layer's mask and method.

    recompute_before   queries at positions before this one are attended again in backward (0: none, the padded length:
                       all); None: the layer keeps all that its backward needs
    """

    mask: Mask
    method: AttentionMethod
    recompute_before: int | None = None

    @cached_property
    def pairs(self) -> AttendedPairs:
        """Of one sequence, over all ranks; exact."""
        seq_len = self.mask.seq_len
        visible, again = self.mask.pairs_before(np.array([seq_len, min(self.recompute_before or 0, seq_len)]))
        return AttendedPairs(int(visible), int(again))


def attended_pairs(turn: Sequence[LayerAttention], num_layers: int, *, sequences: int = 1) -> AttendedPairs:
    """Of all layers of so many equal sequences, over all ranks; `turn`: attention of the layers in turn."""
    found = [turn[index % len(turn)].pairs for index in range(num_layers)]
    return AttendedPairs(*(sequences * sum(counts) for counts in zip(*found, strict=True)))


def attention_layers(
    config: RunConfig, method: AttentionMethod, documents: Sequence[int] = ()
) -> tuple[LayerAttention, ...]:
    """The layers in turn; layer i of a model is number i modulo their count. Raises ConfigError for a bad mask.

    `documents`: start positions of packed documents that no attention crosses, or nothing.
    """
    attention, seq_len = config.attention, config.train.seq_len
    kinds = attention.mask_layers or (attention.mask,)
    masks = {kind: build_mask(kind, seq_len, attention, documents) for kind in set(kinds)}
    policies = checkpoint_kinds(config.memory)
    cuts = {policy: recompute_cut(policy, config, method.cp_size) for policy in set(policies)}
    return tuple(
        LayerAttention(masks[kinds[i % len(kinds)]], method, cuts[policies[i % len(policies)]])
        for i in range(math.lcm(len(kinds), len(policies)))
    )
