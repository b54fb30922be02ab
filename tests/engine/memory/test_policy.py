"""Which policy every layer has, and where the recomputed part of a sequence ends."""

from __future__ import annotations

import pytest

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig, TrainConfig
from engine.planning.memory.policy import layer_policies, recompute_cut


def test_policies_take_turns() -> None:
    kinds = [p.kind for p in layer_policies(MemoryConfig(checkpoint_layers=("none", "full", "full")), 5)]
    assert kinds == ["none", "full", "full", "none", "full"]


def test_groups_share_one_input_and_end_with_the_layers() -> None:
    policies = layer_policies(MemoryConfig(activation_checkpoint="attn_out_every", every_layers=3), 5)
    assert [(p.place, p.group_size) for p in policies] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert [p.keeps_input for p in policies] == [True, False, False, True, False]


def test_another_policy_ends_a_group() -> None:
    memory = MemoryConfig(checkpoint_layers=("attn_out_every", "attn_out_every", "full"), every_layers=4)
    assert [(p.place, p.group_size) for p in layer_policies(memory, 5)] == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("kept", "cut"), [(0.0, 96), (0.25, 72), (0.5, 48), (0.9, 8), (1.0, 0)])
def test_the_cut_of_seq_fraction_is_rounded_to_a_multiple(kept: float, cut: int) -> None:
    config = RunConfig(memory=MemoryConfig(kept_fraction=kept), train=TrainConfig(seq_len=95))
    kinds = ("none", "attn_out", "attn_out_every", "full", "seq_fraction")
    assert [recompute_cut(kind, config, cp_size=4) for kind in kinds] == [None, 0, 0, 96, cut]


def test_ranks_do_not_resolve_auto() -> None:
    with pytest.raises(ConfigError, match="burst launch"):
        layer_policies(MemoryConfig(activation_checkpoint="auto"), 2)
