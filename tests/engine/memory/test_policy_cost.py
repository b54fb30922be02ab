"""What policies keep, compute again and move, counted by hand; test_layer_memory measures what layers keep."""

from __future__ import annotations

from typing import Any

import pytest
from memory_cases import WORLD, seven_b

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, ModelConfig, RunConfig
from engine.planning.memory.cost import (
    PolicyCost,
    kept_bytes,
    method_on,
    own_parameters,
    policy_cost,
    recomputed_parameters,
    state_bytes,
)
from engine.planning.memory.policy import LayerPolicy
from engine.planning.methods.topology import Topology
from engine.planning.time.flops import count_parameters

T, D, H = 262144, 4096, 32  # tokens of a rank, width, heads; H * head size = D


def cost_of(config: RunConfig, world: Topology = WORLD) -> PolicyCost:
    return policy_cost(config, method_on(config, world))


TABLE = {
    "full": 2 * T * D,
    "attn_out": 4 * T * D + 4 * T * H,
}


@pytest.mark.parametrize("rho", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("layout", ["striped", "chunk_cyclic"])
def test_seq_fraction_keeps_its_share_of_results(rho: float, layout: str) -> None:
    attention = {"preset": "striped"} if layout == "striped" else {"preset": "fpdt", "chunk_store": "device"}
    config = seven_b(memory={"activation_checkpoint": "seq_fraction", "kept_fraction": rho}, attention=attention)
    assert {layer.kept_bytes for layer in cost_of(config).layers} == {2 * T * D + round(rho * (2 * T * D + 4 * T * H))}


def test_no_policy_keeps_the_graph_and_a_tile_only_attention() -> None:
    config = seven_b()
    whole, tiled = (
        kept_bytes(LayerPolicy("none"), config, method_on(config, WORLD), tiled=tiled) for tiled in (False, True)
    )
    results = 2 * T * D + 4 * T * H
    assert tiled == 2 * T * D + 3 * 2 * T * D + results
    assert whole == tiled + 2 * T * (2 * D + 3 * 11008) + 2 * T * D + 8 * T


@pytest.mark.parametrize(("rho", "share"), [(0.0, 1.0), (0.25, 0.5625), (0.5, 0.25), (1.0, 0.0)])
def test_seq_fraction_attends_the_earlier_part_squared(rho: float, share: float) -> None:
    full = cost_of(seven_b(memory={"activation_checkpoint": "full"})).attention_flops
    part = cost_of(seven_b(memory={"activation_checkpoint": "seq_fraction", "kept_fraction": rho})).attention_flops
    assert part / full == pytest.approx(share, abs=1e-5)


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


def test_what_lies_on_the_host_is_moved_there_and_back() -> None:
    memory = {"activation_checkpoint": "full", "activation_store": "host"}
    assert cost_of(seven_b(memory=memory)).moved_bytes == 2 * 32 * 2 * T * D
    config = seven_b(memory=memory, train={"grad_accum_steps": 3})
    assert cost_of(config).moved_bytes == 3 * 2 * 32 * 2 * T * D
    assert cost_of(seven_b(memory={"activation_checkpoint": "full"})).moved_bytes == 0


def test_sequences_of_a_batch_are_more_rows_and_tensor_parallel_ranks_divide_heads_and_rows() -> None:
    memory = {"activation_checkpoint": "seq_fraction"}
    one, two = (cost_of(seven_b(memory=memory, train={"micro_batch_size": size})) for size in (1, 2))
    assert (two.kept_bytes, two.recompute_flops) == (2 * one.kept_bytes, 2 * one.recompute_flops)
    config = seven_b(memory={"activation_checkpoint": "attn_out"}, parallel={"tp_size": 2})
    # Twice the rows inside attention, half of the heads.
    assert {layer.kept_bytes for layer in cost_of(config).layers} == {TABLE["attn_out"]}


def test_layers_on_the_host_are_no_choice_where_attention_leaves_its_results_there() -> None:
    memory = {"activation_checkpoint": "full", "activation_store": "host", "host_layers": 3}
    with pytest.raises(ConfigError, match=r"memory\.host_layers=3: attention leaves its results in host memory"):
        cost_of(seven_b(memory=memory, attention={"preset": "fpdt"}))


@pytest.mark.parametrize(
    ("memory", "bytes_each"),
    [
        (MemoryConfig(), 4 + 4 + 8),
        (MemoryConfig(moments_dtype="int8"), 4 + 4 + 2),
        (MemoryConfig(optimizer_in_backward=True), 4 + 8),
    ],
)
def test_states_are_sixteen_bytes_per_parameter_or_less(memory: MemoryConfig, bytes_each: int) -> None:
    assert state_bytes(memory, 1000) == 1000 * bytes_each


def test_a_rank_has_at_least_its_states_and_what_layers_keep() -> None:
    numbers = count_parameters(seven_b().model).total // 8

    def least(**memory: Any) -> tuple[int, int]:
        config = seven_b(memory={"activation_checkpoint": "full", **memory})
        method = method_on(config, WORLD)
        assert own_parameters(config, method) == numbers
        return policy_cost(config, method).least

    layer = TABLE["full"]
    assert least() == (12 * numbers + 32 * layer, 0)
    assert least(activation_store="host", host_layers=5) == (12 * numbers + 27 * layer, 5 * layer)
    assert least(activation_store="host", optimizer_store="host") == (0, 12 * numbers + 32 * layer)
