"""Which policy every layer has; what policies keep, compute again and move, and what NCCL takes, counted by hand.

test_layer_memory measures what layers keep.
"""

from __future__ import annotations

from typing import Any

import pytest
from testkit.memory_cases import WORLD, seven_b

from engine.config.errors import ConfigError
from engine.config.settings import CheckpointKind, MemoryConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.planning.checkpoint_policy import LayerPolicy, layer_policies, recompute_cut
from engine.planning.methods.presets import AttentionMethod
from engine.predict.flops import count_parameters
from engine.predict.memory_ranks import reserve_bytes
from engine.predict.policy_cost import (
    PolicyCost,
    policy_cost,
    rank_parameters,
    recomputed_parameters,
    saved_bytes,
)
from engine.resolve.legality import method_on

T, D, H = 262144, 4096, 32  # tokens of a rank, width, heads; H * head size = D
RESULTS = 2 * T * D + 4 * T * H  # out and lse


def cost_of(**sections: Any) -> PolicyCost:
    config = seven_b(**sections)
    return policy_cost(config, method_on(config, WORLD))


def test_policies_of_layers_repeat() -> None:
    kinds = [policy.kind for policy in layer_policies(MemoryConfig(checkpoint_layers=("none", "full", "full")), 5)]
    assert kinds == ["none", "full", "full", "none", "full"]


def test_layers_of_a_group_share_one_input() -> None:
    grouped = MemoryConfig(activation_checkpoint="attn_out_every", every_layers=3)
    mixed = MemoryConfig(checkpoint_layers=("attn_out_every", "attn_out_every", "full"), every_layers=4)
    for memory, expected in (
        (grouped, [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]),  # groups end with the layers
        (mixed, [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]),  # and with another policy
    ):
        policies = layer_policies(memory, 5)
        assert [(policy.index, policy.group_size) for policy in policies] == expected
        assert [policy.saves_input for policy in policies] == [place == 0 for place, _ in expected]


def test_ranks_do_not_resolve_auto() -> None:
    with pytest.raises(ConfigError, match="burst launch"):
        layer_policies(MemoryConfig(activation_checkpoint="auto"), 2)


@pytest.mark.parametrize(("kept", "cut"), [(0.0, 96), (0.25, 72), (0.5, 48), (0.9, 8), (1.0, 0)])
def test_the_cut_of_seq_fraction_is_rounded_to_a_multiple(kept: float, cut: int) -> None:
    config = RunConfig(memory=MemoryConfig(saved_fraction=kept), train=TrainConfig(seq_len=95))
    kinds: tuple[CheckpointKind, ...] = ("none", "attn_out", "attn_out_every", "full", "seq_fraction")
    assert [recompute_cut(kind, config, cp_size=4) for kind in kinds] == [None, 0, 0, 96, cut]


@pytest.mark.parametrize("rho", [0.0, 0.25, 0.5, 1.0])
def test_seq_fraction_saves_its_share_of_results(rho: float) -> None:
    memory = {"activation_checkpoint": "seq_fraction", "saved_fraction": rho}
    for attention in ({"preset": "striped"}, {"preset": "fpdt", "chunk_store": "device"}):  # fpdt: chunk_cyclic
        cost = cost_of(memory=memory, attention=attention)
        assert set(cost.layer_bytes) == {2 * T * D + round(rho * RESULTS)}


@pytest.mark.parametrize(("rho", "share"), [(0.0, 1.0), (0.25, 0.5625), (0.5, 0.25), (1.0, 0.0)])
def test_seq_fraction_recomputes_the_square_of_the_rest(rho: float, share: float) -> None:
    memory = {"activation_checkpoint": "seq_fraction", "saved_fraction": rho}
    full = cost_of(memory={"activation_checkpoint": "full"}).attention_flops
    assert cost_of(memory=memory).attention_flops / full == pytest.approx(share, abs=1e-5)


def test_saved_bytes_without_checkpointing() -> None:
    config = seven_b()
    whole, tiled = (
        saved_bytes(LayerPolicy("none"), config, method_on(config, WORLD), tiled=tiled) for tiled in (False, True)
    )
    assert tiled == 2 * T * D + 3 * 2 * T * D + RESULTS
    assert whole == tiled + 2 * T * (2 * D + 3 * 11008) + 2 * T * D + 8 * T


@pytest.mark.parametrize(
    ("policy", "tiled", "exchanged", "products"),
    [
        (LayerPolicy("none"), False, False, ""),
        (LayerPolicy("none"), True, False, "o gate up"),  # a tile keeps what attention saves
        (LayerPolicy("full"), False, True, "q k v o gate up"),
        (LayerPolicy("attn_out_every", 1, 2), False, True, "q k v o gate up"),
        (LayerPolicy("attn_out_every", 0, 2), False, False, "q k v o gate up o gate up down"),  # the next one's input
        (LayerPolicy("attn_out_every", 0, 2), False, True, "q k v o gate up q k v o gate up down"),
    ],
)
def test_products_that_run_again(policy: LayerPolicy, tiled: bool, exchanged: bool, products: str) -> None:
    model = ModelConfig(hidden_size=3, ffn_hidden_size=5, num_heads=4, num_kv_heads=2, head_dim=7)
    sizes = {"q": 3 * 28, "k": 3 * 14, "v": 3 * 14, "o": 28 * 3, "gate": 3 * 5, "up": 3 * 5, "down": 5 * 3}
    found = recomputed_parameters(policy, model, tiled=tiled, exchanged=exchanged)
    assert found == sum(sizes[name] for name in products.split())


def test_sequences_of_a_batch_are_more_rows() -> None:
    memory = {"activation_checkpoint": "seq_fraction"}
    one, two = (cost_of(memory=memory, train={"micro_batch_size": size}) for size in (1, 2))
    assert two.saved_bytes == 2 * one.saved_bytes
    assert two.recompute_flops == 2 * one.recompute_flops


def test_tensor_parallel_ranks_divide_heads() -> None:
    split = cost_of(memory={"activation_checkpoint": "attn_out"}, parallel={"tp_size": 2})
    # Twice the rows inside attention, half of the heads.
    assert set(split.layer_bytes) == {2 * T * D + RESULTS}


LAYER_INPUT = 2 * T * D  # bytes that a layer saves under full recomputation
SHARD = count_parameters(seven_b().model).total // 8  # parameters of a rank
ON_HOST: dict[str, Any] = {"activation_store": "host"}
STORES: list[tuple[dict[str, Any], int, int, int]] = [  # memory settings; bytes on device, on host, moved
    ({}, 12 * SHARD + 32 * LAYER_INPUT, 0, 0),
    (ON_HOST, 12 * SHARD, 32 * LAYER_INPUT, 2 * 32 * LAYER_INPUT),
    ({**ON_HOST, "host_layers": 5}, 12 * SHARD + 27 * LAYER_INPUT, 5 * LAYER_INPUT, 2 * 5 * LAYER_INPUT),
    ({"optimizer_store": "host"}, 32 * LAYER_INPUT, 12 * SHARD, 3 * 4 * SHARD),
]


def test_parameters_are_divided_over_all_ranks() -> None:
    config = seven_b()
    assert rank_parameters(config, method_on(config, WORLD)) == SHARD


@pytest.mark.parametrize(("memory", "device", "host", "moved"), STORES)
def test_least_memory_is_states_plus_saved_tensors(memory: dict[str, Any], device: int, host: int, moved: int) -> None:
    assert cost_of(memory={"activation_checkpoint": "full", **memory}).least == (device, host)


@pytest.mark.parametrize(("memory", "device", "host", "moved"), STORES)
def test_host_stores_move_their_bytes_in_every_micro_step(
    memory: dict[str, Any], device: int, host: int, moved: int
) -> None:
    full = {"activation_checkpoint": "full", **memory}
    assert cost_of(memory=full).moved_bytes == moved
    assert cost_of(memory=full, train={"grad_accum_steps": 3}).moved_bytes == 3 * moved


def test_on_a_cpu_all_memory_is_device_memory() -> None:
    on_cpu = cost_of(memory={"activation_checkpoint": "full", "optimizer_store": "host"}, cluster={"backend": "gloo"})
    assert on_cpu.least == (12 * SHARD + 32 * LAYER_INPUT, 0)


def test_host_layers_are_refused_if_attention_stores_on_the_host() -> None:
    with pytest.raises(ConfigError, match=r"memory\.host_layers=3: attention leaves its results in host memory"):
        cost_of(memory={**ON_HOST, "host_layers": 3}, attention={"preset": "fpdt"})


MIB = 2**20


@pytest.mark.parametrize(
    ("world", "inner", "heads", "outer", "expected"),
    [
        pytest.param(1, 1, 1, 1, 512 * MIB, id="one rank"),
        pytest.param(2, 1, 1, 1, 2 * 544 * MIB, id="two ranks: the world and the shards"),
        pytest.param(8, 1, 1, 1, 2 * 688 * MIB, id="eight ranks"),
        pytest.param(2, 2, 1, 1, 4 * 544 * MIB, id="a ring of two: payload and gradients besides"),
        pytest.param(8, 1, 8, 1, 2 * 688 * MIB + 3_300_000_000, id="all-to-all on a node"),
        pytest.param(16, 1, 16, 1, 2 * 688 * MIB + 3_300_000_000, id="all-to-all over two nodes"),
        pytest.param(2, 1, 2, 1, 3 * 544 * MIB, id="all-to-all of two is no less than any group of two"),
        pytest.param(8, 4, 2, 1, 4 * 688 * MIB + 544 * MIB, id="rings of four beside all-to-all of two"),
        pytest.param(8, 2, 2, 2, 2 * 688 * MIB + 5 * 544 * MIB, id="rings in and between nodes, and all-to-all of two"),
    ],
)
def test_communicators_take_what_was_measured(world: int, inner: int, heads: int, outer: int, expected: int) -> None:
    method = AttentionMethod("burst", "zigzag", inner, outer, "kv", "float32", head_parallel_size=heads)
    parallel = ParallelConfig(dp_shard_size=world // (inner * outer * heads))
    assert reserve_bytes(parallel, method, world, 10**9) == 800 * MIB + expected + 30_000_000  # 3% of the peak
