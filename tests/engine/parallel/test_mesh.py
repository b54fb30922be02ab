"""Degrees, topology and placement as plain integers; the mesh itself on gloo ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.ranks import Pools, RankFailedError

from engine.attention.topology import Topology
from engine.config import ParallelConfig
from engine.config_cluster import ClusterConfig
from engine.errors import ConfigError
from engine.parallel.mesh import (
    Degrees,
    Placement,
    build_mesh,
    choose_device,
    limit_waits,
    read_placement,
    resolve_degrees,
    resolve_topology,
    step_timeout,
)
from engine.parallel.shard import RowPart


def test_cp_takes_the_ranks_that_data_parallelism_leaves() -> None:
    assert resolve_degrees(ParallelConfig(dp_shard_size=2), 8) == Degrees(1, 2, 4)


def test_cp_takes_the_ranks_that_tensor_parallelism_leaves() -> None:
    assert resolve_degrees(ParallelConfig(tp_size=8), 8) == Degrees(1, 1, 1, 8)
    assert resolve_degrees(ParallelConfig(tp_size=4), 8) == Degrees(1, 1, 2, 4)


def test_degrees_that_do_not_multiply_to_the_world_size_are_refused_with_the_product() -> None:
    with pytest.raises(ConfigError, match=r"= 4, but 6 ranks were started; start 4 ranks"):
        resolve_degrees(ParallelConfig(cp_size=2, dp_shard_size=2), 6)
    with pytest.raises(ConfigError, match=r"cp_size 2 x tp_size 2 = 4, but 6 ranks were started"):
        resolve_degrees(ParallelConfig(cp_size=2, tp_size=2), 6)


def test_data_parallel_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="= 3 does not divide 4 ranks"):
        resolve_degrees(ParallelConfig(dp_shard_size=3), 4)


def test_every_degree_below_one_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(ParallelConfig(cp_size=0, dp_shard_size=-1, dp_replicate_size=0, tp_size=0), 4)
    assert len(caught.value.problems) == 4


def test_cp_groups_are_neighbours_and_cover_every_rank_once() -> None:
    assert Degrees(2, 1, 2).cp_groups() == ((0, 1), (2, 3))
    assert Degrees(1, 1, 3).cp_groups() == ((0, 1, 2),)


def test_cp_groups_are_strided_by_the_tp_ranks_between_them() -> None:
    assert Degrees(1, 2, 2, 2).cp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Degrees(1, 1, 1, 2).cp_groups() == ((0,), (1,))


def test_topology_follows_the_processes_or_the_configuration() -> None:
    assert resolve_topology(ClusterConfig(), 8, 4) == Topology(2, 4)
    assert resolve_topology(ClusterConfig(topology_nodes=4), 8, 8) == Topology(4, 2)
    assert resolve_topology(ClusterConfig(), 5, 0) == Topology(5, 1)


def test_topology_nodes_that_do_not_divide_the_ranks_list_the_legal_values() -> None:
    with pytest.raises(ConfigError, match=r"got 4, which does not divide 6 ranks; legal values: 1, 2, 3, 6"):
        resolve_topology(ClusterConfig(topology_nodes=4), 6, 6)


def test_placement_without_torchrun_is_one_rank() -> None:
    assert read_placement({}) == Placement(0, 1, 0, 1)


def test_gloo_trains_on_the_cpu() -> None:
    assert choose_device(ClusterConfig(backend="gloo"), Placement(0, 64, 0, 64)).type == "cpu"


def mesh_facts(parallel: ParallelConfig, cluster: ClusterConfig) -> dict[str, Any]:
    mesh = build_mesh(parallel, cluster)
    return {
        "tp": (mesh.tp_rank, mesh.tp_size, mesh.row_part),
        "tp_mesh": mesh.tp_mesh.mesh.tolist() if mesh.tp_mesh is not None else None,
        "cp_topology": mesh.cp_topology,
        "own_group": next(group for group in mesh.cp_groups if mesh.rank in group),
        "cp": (mesh.cp_rank, mesh.cp_size),
        "dp": (mesh.dp_rank, mesh.dp_size),
        "groups": mesh.cp_groups,
        "names": mesh.device_mesh.mesh_dim_names,
        "cp_mesh": mesh.device_mesh["cp"].mesh.tolist(),
        "fsdp": mesh.fsdp_mesh.mesh.tolist(),
        "topology": mesh.topology,
    }


def problems_of_mesh(parallel: ParallelConfig, cluster: ClusterConfig) -> tuple[str, ...]:
    try:
        build_mesh(parallel, cluster)
    except ConfigError as error:
        return error.problems
    return ()


def test_four_ranks_as_two_replicas_of_two_context_parallel_ranks(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(dp_replicate_size=2, cp_size=2), ClusterConfig(topology_nodes=2))
    assert [fact["cp"] for fact in facts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [fact["cp_mesh"] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert facts[3]["groups"] == ((0, 1), (2, 3))
    assert facts[0]["names"] == ("dp_replicate", "dp_shard", "cp", "tp")
    assert facts[0]["tp_mesh"] is None
    assert facts[0]["fsdp"] == [[0, 1], [2, 3]]
    assert facts[0]["topology"] == Topology(2, 2)


def test_parameters_are_sharded_over_dp_and_cp_together(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(dp_shard_size=2), ClusterConfig())
    assert facts[0]["fsdp"] == [0, 1, 2, 3]
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_all_problems_of_a_mesh_are_listed_at_once_on_every_rank(ranks: Pools) -> None:
    problems = ranks(2).run(problems_of_mesh, ParallelConfig(cp_size=3), ClusterConfig(topology_nodes=5))
    assert [len(found) for found in problems] == [2, 2]


def test_four_ranks_as_two_context_parallel_pairs_of_two_tensor_parallel_ranks(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(tp_size=2), ClusterConfig(topology_nodes=2))
    assert [fact["tp"] for fact in facts] == [(r, 2, RowPart(r, 2)) for r in (0, 1, 0, 1)]
    assert [fact["tp_mesh"] for fact in facts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [fact["cp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [fact["own_group"] for fact in facts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [fact["cp_mesh"] for fact in facts] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [fact["fsdp"] for fact in facts] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [fact["dp"] for fact in facts] == [(0, 1)] * 4
    assert facts[0]["cp_topology"] == Topology(2, 1)  # each of the two nodes has one rank of a cp group


def test_data_parallel_ranks_do_not_count_tensor_parallel_ones(ranks: Pools) -> None:
    facts = ranks(4).run(mesh_facts, ParallelConfig(tp_size=2, dp_replicate_size=2), ClusterConfig())
    assert [fact["dp"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert facts[1]["fsdp"] == [[1], [3]]
    assert facts[0]["cp_topology"] == Topology(1, 1)


def test_tensor_parallelism_across_nodes_is_refused_with_the_legal_values(ranks: Pools) -> None:
    (problem,) = ranks(4).run(problems_of_mesh, ParallelConfig(tp_size=4), ClusterConfig(topology_nodes=2))[0]
    assert "does not divide the 2 ranks of a node" in problem
    assert "legal values: 1, 2" in problem


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
