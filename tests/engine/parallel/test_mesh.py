"""Degrees, topology and placement as plain integers; the mesh itself on gloo ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.ranks import Pools, RankFailedError

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import ModelConfig, ParallelConfig
from engine.parallel.mesh import (
    Placement,
    build_mesh,
    choose_device,
    limit_waits,
    read_placement,
    step_timeout,
)
from engine.parallel.shard import RowPart
from engine.planning.methods.topology import Degrees, Topology, known_cp_size, place_ranks, tensor_parallel_problems


@pytest.mark.parametrize(
    ("sizes", "world_size", "cp_size"),
    [
        ({}, None, None),
        ({"cp_size": 2}, None, 2),
        ({"tp_size": 2}, None, None),
        ({}, 4, 4),
        ({"dp_shard_size": 2}, 8, 4),
        ({"tp_size": 4}, 8, 2),
        ({"tp_size": 2, "dp_shard_size": 2}, 4, 1),
        ({"dp_shard_size": 3}, 4, None),
    ],
)
def test_cp_takes_the_ranks_that_the_others_leave(
    sizes: dict[str, int], world_size: int | None, cp_size: int | None
) -> None:
    parallel = ParallelConfig(**sizes)
    assert known_cp_size(parallel, world_size) == cp_size
    if world_size is not None and cp_size is not None:
        assert place_ranks(parallel, world_size, 1)[0].cp_size == cp_size


@pytest.mark.parametrize(
    ("parallel", "world_size", "nodes", "problems"),
    [
        (ParallelConfig(cp_size=2, dp_shard_size=2), 6, 1, ["x cp_size 2 = 4, but there are 6 ranks; take 4 ranks"]),
        (ParallelConfig(cp_size=2, tp_size=2), 6, 1, ["cp_size 2 x tp_size 2 = 4, but there are 6 ranks"]),
        (ParallelConfig(dp_shard_size=3), 4, 1, ["= 3 does not divide the 4 ranks; choose degrees that do"]),
        (ParallelConfig(), 6, 4, ["4 nodes cannot share 6 ranks evenly; choose a divisor: 1, 2, 3, 6"]),
        (ParallelConfig(tp_size=4), 4, 2, ["does not divide the 2 ranks of a node, and tensor parallelism stays"]),
        (ParallelConfig(cp_size=3), 2, 5, ["5 nodes cannot share 2 ranks", "cp_size 3 = 3, but there are 2 ranks"]),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused_with_every_reason(
    parallel: ParallelConfig, world_size: int, nodes: int, problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        place_ranks(parallel, world_size, nodes)
    assert len(caught.value.problems) == len(problems)
    assert all(part in text for part, text in zip(problems, caught.value.problems, strict=True))


def test_every_size_that_cannot_be_sliced_is_listed_with_the_legal_values() -> None:
    model = ModelConfig(num_heads=8, num_kv_heads=4, ffn_hidden_size=64, vocab_size=256)
    problems = tensor_parallel_problems(model, 3)
    assert len(problems) == 4
    assert all("legal values for this model: 1, 2, 4" in text for text in problems)
    assert "pad to model.vocab_size=258" in problems[3]
    assert [text.split("model.")[1].split("=")[0] for text in tensor_parallel_problems(model, 8)] == ["num_kv_heads"]


def test_cp_groups_are_neighbours_and_cover_every_rank_once() -> None:
    assert Degrees(2, 1, 2).cp_groups() == ((0, 1), (2, 3))
    assert Degrees(1, 1, 3).cp_groups() == ((0, 1, 2),)


def test_cp_groups_are_strided_by_the_tp_ranks_between_them() -> None:
    assert Degrees(1, 2, 2, 2).cp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Degrees(1, 1, 1, 2).cp_groups() == ((0,), (1,))


def test_placement_without_torchrun_is_one_rank() -> None:
    assert read_placement({}) == Placement(0, 1, 0, 1)


def test_gloo_trains_on_the_cpu() -> None:
    assert choose_device(ClusterConfig(backend="gloo"), Placement(0, 64, 0, 64)).type == "cpu"
    gpus = torch.cuda.device_count()  # none on most machines that run this
    expected = f"GPUs visible: {gpus}; set cluster.ranks_per_node={gpus}" if gpus else "sees no GPU on this node"
    with pytest.raises(ConfigError, match=expected):
        choose_device(ClusterConfig(backend="nccl"), Placement(0, 64, 0, 64))


def mesh_facts(parallel: ParallelConfig, cluster: ClusterConfig) -> dict[str, Any]:
    mesh = build_mesh(parallel, cluster)
    return {
        "tp": (mesh.tp_rank, mesh.tp_size, mesh.row_part),
        "tp_mesh": mesh.tp_mesh.mesh.tolist() if mesh.tp_mesh is not None else None,
        "cp_topology": mesh.cp_topology,
        "own_group": next(group for group in mesh.cp_groups if mesh.rank in group),
        "cp": (mesh.cp_rank, mesh.degrees.cp_size),
        "dp": (mesh.dp_rank, mesh.dp_size),
        "groups": mesh.cp_groups,
        "fsdp": mesh.fsdp_mesh.mesh.tolist(),
        "topology": mesh.topology,
    }


def test_four_ranks_as_two_replicas_of_two_context_parallel_ranks(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(dp_replicate_size=2, cp_size=2), ClusterConfig(topology_nodes=2))
    assert [fact["cp"] for fact in facts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert facts[3]["groups"] == ((0, 1), (2, 3))
    assert facts[0]["tp_mesh"] is None
    assert facts[0]["fsdp"] == [[0, 1], [2, 3]]
    assert facts[0]["topology"] == Topology(2, 2)


def test_parameters_are_sharded_over_dp_and_cp_together(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(dp_shard_size=2), ClusterConfig())
    assert facts[0]["fsdp"] == [0, 1, 2, 3]
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert facts[0]["topology"] == Topology(1, 4)  # as the processes lie


def test_four_ranks_as_two_context_parallel_pairs_of_two_tensor_parallel_ranks(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(tp_size=2), ClusterConfig(topology_nodes=2))
    assert [fact["tp"] for fact in facts] == [(r, 2, RowPart(r, 2)) for r in (0, 1, 0, 1)]
    assert [fact["tp_mesh"] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [fact["cp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [fact["own_group"] for fact in facts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [fact["fsdp"] for fact in facts] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [fact["dp"] for fact in facts] == [(0, 1)] * 4
    assert facts[0]["cp_topology"] == Topology(2, 1)  # each of the two nodes has one rank of a cp group


def test_data_parallel_ranks_do_not_count_tensor_parallel_ones(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(tp_size=2, dp_replicate_size=2), ClusterConfig())
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert facts[1]["fsdp"] == [[1], [3]]
    assert facts[0]["cp_topology"] == Topology(1, 1)


def wait_alone() -> None:
    """The first rank reduces over a group of the mesh, and the other one never comes."""
    mesh = build_mesh(ParallelConfig(dp_replicate_size=2), ClusterConfig(backend="gloo"))
    limit_waits(mesh, timedelta(seconds=1))
    if mesh.rank == 0:
        dist.all_reduce(torch.zeros(1), group=mesh.fsdp_mesh.get_group("dp_replicate"))


def test_in_training_no_group_waits_for_a_rank_that_does_not_come(ranks: Pools) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0[\s\S]*(Timed out|timed out|timeout)[\s\S]*1000 ?ms"):
        ranks(2).run(wait_alone, timeout_s=60.0)


def test_a_wait_in_training_ends_after_whoever_watches_for_hangs() -> None:
    limits = [step_timeout(ClusterConfig(hang_timeout_s=seconds)).total_seconds() for seconds in (None, 8.0, 3600.0)]
    assert limits == [600.0, 600.0, 7200.0]
