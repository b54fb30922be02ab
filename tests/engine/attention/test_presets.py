"""Presets resolve to legal methods, choose what circulates by bytes and say why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.attention.presets import PRESETS, resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, ModelConfig, RunConfig, TrainConfig
from engine.errors import ConfigError

MHA = ModelConfig(num_heads=32, num_kv_heads=32, head_dim=128, hidden_size=4096)
GQA = replace(MHA, num_kv_heads=8)


def resolve(preset: str, model: ModelConfig = MHA, nodes: int = 2, local: int = 4, **fields: object):
    attention = AttentionConfig(preset=preset, **fields)  # type: ignore[arg-type]
    config = RunConfig(model=model, attention=attention, train=TrainConfig(seq_len=1 << 20))
    return resolve_attention(config, Topology(nodes, local))


@pytest.mark.parametrize(
    ("preset", "inner", "outer", "layout"),
    [("ring", 8, 1, "zigzag"), ("striped", 8, 1, "striped"), ("burst", 4, 2, "zigzag")],
)
def test_presets_follow_the_topology(preset: str, inner: int, outer: int, layout: str) -> None:
    method = resolve(preset)
    assert (method.ring_inner_size, method.ring_outer_size, method.layout) == (inner, outer, layout)


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (4, 1), (3, 2)])
def test_burst_takes_nodes_outside_and_local_ranks_inside(nodes: int, local: int) -> None:
    method = resolve("burst", nodes=nodes, local=local)
    assert (method.ring_inner_size, method.ring_outer_size) == (local, nodes)


def test_auto_circulates_q_for_mha_and_kv_for_gqa_and_says_why() -> None:
    mha, gqa = resolve("burst"), resolve("burst", GQA)
    assert (mha.backward_circulates, gqa.backward_circulates) == ("q", "kv")
    assert "multi-head" in mha.reason
    assert "4 query heads per kv head" in gqa.reason


def test_every_field_can_be_overridden() -> None:
    method = resolve("burst", ring_inner_size=2, layout="striped", backward_circulates="kv")
    assert (method.ring_inner_size, method.ring_outer_size) == (2, 4)
    assert (method.layout, method.backward_circulates) == ("striped", "kv")


def test_single_on_one_rank_is_a_ring_of_one() -> None:
    assert resolve("single", nodes=1, local=1).cp_size == 1


def test_single_on_several_ranks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.cp_size=1"):
        resolve("single")


def test_ring_sizes_that_do_not_multiply_list_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match="1x8, 2x4, 4x2, 8x1"):
        resolve("burst", ring_inner_size=3, ring_outer_size=3)


def test_a_sequence_shorter_than_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="every rank needs at least one"):
        resolve_attention(
            RunConfig(attention=AttentionConfig(preset="ring"), train=TrainConfig(seq_len=3)), Topology(1, 8)
        )


def test_every_preset_describes_itself() -> None:
    assert all(preset.description for preset in PRESETS.values())


@pytest.mark.parametrize(("size", "expected"), [(4, (1, 4)), (2, (1, 2)), (8, (2, 4)), (6, (6, 1))])
def test_topology_of_a_group_of_consecutive_ranks(size: int, expected: tuple[int, int]) -> None:
    group = Topology(4, 4).group(size)
    assert (group.nodes, group.local_ranks) == expected
