"""Checkpoint policies: what every layer keeps for its backward pass and what it computes again. Standard library only.

    policy               keeps                                              computes again
    none                 everything                                         nothing
    full                 its input                                          everything, attention too
    attn_out             its input, attention's out and lse                 all but attention
    seq_fraction         its input, out and lse of the last part of the     the linear work, and attention of the
                         sequence (saved_fraction, rho)                      first part: (1 - rho)**2 of causal
    attn_out_every       out and lse; its input only every k-th layer       the linear work, and the inputs in between

Sources: Chen et al. 2016 (full), Gu et al. 2024 (attn_out: Selective Checkpoint++), Sun et al. 2025 (BurstEngine's
sequence-level selective checkpointing); attn_out_every is ours: between two kept inputs the residual stream follows
from attention's results by linear work alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from engine.config.errors import ConfigError
from engine.config.settings import CheckpointKind, MemoryConfig, RunConfig
from engine.planning.topology import length_multiple, padded_length


@dataclass(frozen=True)
class LayerPolicy:
    """What one layer keeps.

    place, group_size   attn_out_every: the layer's place in its group; place 0 keeps the group's input
    """

    kind: CheckpointKind
    place: int = 0
    group_size: int = 1

    @property
    def keeps_input(self) -> bool:
        """Whether the layer's own input is kept."""
        return self.place == 0


def layer_policies(memory: MemoryConfig, num_layers: int) -> tuple[LayerPolicy, ...]:
    """The policy of every layer; runs of attn_out_every are divided into groups of `every_layers`.

    Raises ConfigError while it is `auto`.
    """
    if memory.activation_checkpoint == "auto" and not memory.checkpoint_layers:
        raise ConfigError(
            "memory.activation_checkpoint=auto is resolved by `burst launch` before ranks start; "
            "start with it, or name a policy such as full or attn_out"
        )
    layer_pattern = checkpoint_kinds(memory)
    kinds = [layer_pattern[index % len(layer_pattern)] for index in range(num_layers)]
    policies: list[LayerPolicy] = []
    for kind, run in groupby(kinds):
        count = len(list(run))
        size = memory.every_layers if kind == "attn_out_every" else 1
        for index in range(count):
            first = index - index % size
            policies.append(LayerPolicy(kind, index % size, min(size, count - first)))
    return tuple(policies)


def checkpoint_kinds(memory: MemoryConfig) -> tuple[CheckpointKind, ...]:
    """Kinds of policy of the layers in turn. Before `auto` is resolved, that which attends everything again stands for
    it.
    """
    kind = memory.activation_checkpoint
    return memory.checkpoint_layers or ("full" if kind == "auto" else kind,)


def recompute_cut(kind: CheckpointKind, config: RunConfig, cp_size: int) -> int | None:
    """Queries at positions before this one are attended again in backward; None: the layer keeps everything.

    Counted in the padded sequence: its whole length, padding included, where all rows are computed again, 0 where none
    are. Every other cut gives all ranks equally many rows on its two sides under a zigzag that has it as its border.
    """
    if kind == "none":
        return None
    tp_size = config.parallel.tp_size
    padded, multiple = padded_length(config.train.seq_len, cp_size, tp_size), length_multiple(cp_size, tp_size)
    again = {"full": 1.0, "seq_fraction": 1.0 - config.memory.saved_fraction}.get(kind, 0.0)
    return multiple * round(again * padded / multiple)
