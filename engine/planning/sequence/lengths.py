"""Lengths that all ranks agree on: how a sequence is padded, and where attention is cut for recomputation.

Standard library only, because presets need it and the command line checks those without torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.config.settings import CheckpointKind, MemoryConfig, RunConfig
from engine.planning.memory.policy import policy_kinds


def length_multiple(cp_size: int, tp_size: int = 1) -> int:
    """Tokens of which a length must be a multiple, so that every rank gets two equal chunks that tp ranks divide."""
    return math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * tp_size)


def padded_length(seq_len: int, cp_size: int, tp_size: int = 1) -> int:
    """seq_len rounded up so that every rank gets two equal chunks, which its tp ranks can divide."""
    multiple = length_multiple(cp_size, tp_size)
    return -(-seq_len // multiple) * multiple


def checkpoint_kinds(memory: MemoryConfig) -> tuple[CheckpointKind, ...]:
    """Kinds of policy of the layers in turn. Before `auto` is settled, that which attends everything again stands for
    it.
    """
    undecided = memory.activation_checkpoint == "auto"
    return policy_kinds(replace(memory, activation_checkpoint="full") if undecided else memory)


def recompute_cut(kind: CheckpointKind, config: RunConfig, cp_size: int) -> int | None:
    """Queries at positions before this one are attended again in backward; None: the layer keeps everything.

    Counted in the padded sequence: its whole length, padding included, where all rows are computed again, 0 where none
    are. Every other cut gives all ranks equally many rows on its two sides under a zigzag that has it as its border.
    """
    if kind == "none":
        return None
    tp_size = config.parallel.tp_size
    padded, multiple = padded_length(config.train.seq_len, cp_size, tp_size), length_multiple(cp_size, tp_size)
    again = {"full": 1.0, "seq_fraction": 1.0 - config.memory.kept_fraction}.get(kind, 0.0)
    return multiple * round(again * padded / multiple)
