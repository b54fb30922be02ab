"""Activation checkpoint policies: what a layer saves for backward and what it recomputes. Standard library only.

    policy               saves                                              recomputes
    none                 everything                                         nothing
    full                 its input                                          everything, attention included
    attn_out             its input, attention's out and lse                 all but attention
    seq_fraction         its input; out and lse of the last part of the     linear layers, and attention of the first
                         sequence (saved_fraction, rho)                     part: (1 - rho)**2 of causal attention
    attn_out_every       out and lse; its input only every k-th layer       linear layers, and the inputs in between

References: Chen et al. 2016 (full), Gu et al. 2024 (attn_out: Selective Checkpoint++), Sun et al. 2025 (BurstEngine's
sequence-level selective checkpointing). attn_out_every is new here: between two saved inputs the residual stream
follows from attention's results by linear layers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from engine.config.errors import ConfigError
from engine.config.settings import CheckpointKind, Implementation, MemoryConfig, RunConfig
from engine.planning.topology import length_multiple, padded_length

# What the layers of an implementation can do (`engine.activations`).
POLICIES_OF: Mapping[Implementation, frozenset[CheckpointKind]] = {
    "burst": frozenset({"none", "full", "attn_out", "seq_fraction", "attn_out_every"}),
    "hf": frozenset({"none", "full", "attn_out", "seq_fraction"}),
}


@dataclass(frozen=True)
class LayerPolicy:
    """What one layer saves.

    Attributes:
        kind: The policy.
        index: attn_out_every: index of the layer in its group; layer 0 saves the group's input.
        group_size: attn_out_every: layers of the group.
    """

    kind: CheckpointKind
    index: int = 0
    group_size: int = 1

    @property
    def saves_input(self) -> bool:
        """Whether the layer saves its input."""
        return self.index == 0


def layer_policies(memory: MemoryConfig, num_layers: int) -> tuple[LayerPolicy, ...]:
    """Return the policy of every layer; consecutive attn_out_every layers form groups of `every_layers`.

    Raises:
        ConfigError: The policy is still `auto`.
    """
    if memory.activation_checkpoint == "auto" and not memory.checkpoint_layers:
        raise ConfigError(
            "memory.activation_checkpoint=auto is resolved by `burst launch`, which writes resolved.json beside "
            "config.yaml, and that file is missing; start with `burst launch`, or name a policy such as full or "
            "attn_out"
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
    """Return the pattern of policies over layers. Unresolved `auto` counts as full, which recomputes all attention."""
    kind = memory.activation_checkpoint
    return memory.checkpoint_layers or ("full" if kind == "auto" else kind,)


def recompute_cut(kind: CheckpointKind, config: RunConfig, cp_size: int) -> int | None:
    """Return the position before which backward recomputes attention of the queries; None: the layer saves everything.

    Positions are those of the padded sequence: its length if all rows are recomputed, 0 if none are. Other cuts are
    rounded so that under a zigzag layout split at the cut all ranks have equally many rows on both sides.

    Args:
        kind: The layer's policy.
        config: saved_fraction, sequence length and tensor parallelism.
        cp_size: Ranks that share a sequence.
    """
    if kind == "none":
        return None
    tp_size = config.parallel.tp_size
    padded, multiple = padded_length(config.train.seq_len, cp_size, tp_size), length_multiple(cp_size, tp_size)
    recomputed = {"full": 1.0, "seq_fraction": 1.0 - config.memory.saved_fraction}.get(kind, 0.0)
    return multiple * round(recomputed * padded / multiple)
