"""Degrees, topology and placement as plain integers; the mesh itself on gloo ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from testkit.ranks import Pools, RankFailedError

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import ModelConfig, ParallelConfig
from engine.distributed.mesh import (
    Placement,
    RowPart,
    build_mesh,
    check_world,
    choose_device,
    limit_waits,
    read_placement,
    step_timeout,
)
from engine.planning.topology import Degrees, Topology
from engine.resolve.degrees import known_cp_size, resolve_topology, tensor_parallel_problems


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
        assert resolve_topology(parallel, world_size, 1)[0].cp_size == cp_size


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
        resolve_topology(parallel, world_size, nodes)
    assert len(caught.value.problems) == len(problems)
    assert all(part in text for part, text in zip(problems, caught.value.problems, strict=True))


def test_every_size_that_cannot_be_sliced_is_listed_with_the_legal_values() -> None:
    model = ModelConfig(num_heads=8, num_kv_heads=4, ffn_hidden_size=64, vocab_size=256)
    problems = tensor_parallel_problems(model, 3)
    assert len(problems) == 4
    assert all("legal values for this model: 1, 2, 4" in text for text in problems)
    assert "pad to model.vocab_size=258" in problems[3]
    assert [text.split("model.")[1].split("=")[0] for text in tensor_parallel_problems(model, 8)] == ["num_kv_heads"]


def test_cp_groups_cover_every_rank_once_strided_by_the_tp_ranks_between_them() -> None:
    assert Degrees(2, 1, 2).cp_groups() == ((0, 1), (2, 3))
    assert Degrees(1, 1, 3).cp_groups() == ((0, 1, 2),)
    assert Degrees(1, 2, 2, 2).cp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Degrees(1, 1, 1, 2).cp_groups() == ((0,), (1,))


def test_without_torchrun_there_is_one_rank() -> None:
    assert read_placement({}) == Placement(0, 1, 0, 1)
    assert read_placement({"WORLD_SIZE": "8"}) == Placement(0, 8, 0, 8)
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_placement(place) == Placement(5, 8, 1, 4)


FEW = "cluster: 4 ranks on this node, but GPUs visible: 2; set cluster.ranks_per_node=2, or cluster.backend=gloo"


@pytest.mark.parametrize(
    ("backend", "share", "devices"),
    [
        ("auto", True, ["cpu", FEW, "cuda:3"]),
        ("gloo", False, ["cpu", "cpu", "cpu"]),
        ("gloo", True, ["cpu", "cuda:1", "cuda:3"]),
        ("nccl", False, ["cluster.backend=nccl: torch ", FEW, "cuda:3"]),
    ],
)
def test_a_rank_computes_on_one_gpu_or_on_the_cpu_with_gloo(backend: Any, share: bool, devices: Any) -> None:
    cluster = ClusterConfig(backend=backend, ranks_share_device=share)
    for gpus, device in zip((0, 2, 4), devices, strict=True):
        if device.startswith(("cpu", "cuda:")):
            assert str(choose_device(cluster, Placement(7, 8, 3, 4), gpus)) == device
        else:
            with pytest.raises(ConfigError, match=device):
                choose_device(cluster, Placement(7, 8, 3, 4), gpus)


def test_ranks_that_were_started_are_those_of_the_configuration() -> None:
    placement, named = Placement(5, 8, 1, 4), ClusterConfig(nodes="n[1-2]", ranks_per_node=4)
    for cluster in (ClusterConfig(num_nodes=2, ranks_per_node=4), named, ClusterConfig()):
        check_world(cluster, placement)
    for cluster, problem in (
        (ClusterConfig(num_nodes=3, ranks_per_node=4), "num_nodes 3 x cluster.ranks_per_node 4 = 12 ranks, but 8 "),
        (ClusterConfig(ranks_per_node=4), "num_nodes 1 x cluster.ranks_per_node 4 = 4 ranks, but 8 ranks were started"),
        (replace(named, ranks_per_node=2), "ranks_per_node: got 2, but 8 ranks were started, 4 of them on this node"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_world(cluster, placement)
        assert str(caught.value).startswith(f"cluster.{problem}")


def mesh_of_rank(parallel: ParallelConfig, cluster: ClusterConfig) -> tuple[Any, ...]:
    """Places, groups, topologies and rows of this rank."""
    mesh = build_mesh(parallel, cluster)
    own_group = next(group for group in mesh.degrees.cp_groups() if mesh.rank in group)
    return (
        (mesh.dp_rank, mesh.cp_rank, mesh.tp_rank),
        (mesh.dp_size, mesh.degrees.cp_size, mesh.degrees.tp_size),
        (list(own_group), mesh.fsdp_mesh.mesh.tolist(), None if mesh.tp_mesh is None else mesh.tp_mesh.mesh.tolist()),
        (mesh.topology, mesh.cp_topology),
        mesh.row_part,
    )


@pytest.mark.parametrize(
    ("sizes", "nodes", "of_cp"),
    [
        ((2, 1, 2, 1), 2, Topology(1, 2)),
        ((1, 2, 2, 1), None, Topology(1, 2)),
        ((1, 1, 2, 2), 2, Topology(2, 1)),
        ((2, 1, 1, 2), None, Topology(1, 1)),
    ],
)
def test_four_ranks_form_the_grid_of_their_axes(
    ranks: Pools, sizes: tuple[int, int, int, int], nodes: int | None, of_cp: Topology
) -> None:
    """Replicas, shards, cp and tp are axes of a grid, the last of them of neighbours."""
    replicas, shards, cp, tp = sizes
    grid, expected = np.arange(4).reshape(sizes), []
    for r, s, c, t in np.ndindex(sizes):
        fsdp = grid[..., t].reshape(replicas, -1) if replicas > 1 else grid[..., t].flatten()
        groups = (grid[r, s, :, t].tolist(), fsdp.tolist(), grid[r, s, c].tolist() if tp > 1 else None)
        topologies = (Topology(nodes or 1, 4 // (nodes or 1)), of_cp)  # as the processes lie
        expected += [((r * shards + s, c, t), (replicas * shards, cp, tp), groups, topologies, RowPart(t, tp))]
    parallel = ParallelConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=tp)
    assert ranks(4).run(mesh_of_rank, parallel, ClusterConfig(topology_nodes=nodes)) == expected


def topology_by(local_sizes: tuple[int, ...]) -> Topology:
    """What is found where torchrun has told this rank so many ranks on its node."""
    started = os.environ["LOCAL_WORLD_SIZE"]
    try:
        os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[dist.get_rank()])
        return build_mesh(ParallelConfig(), ClusterConfig(backend="gloo")).topology
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = started


@pytest.mark.parametrize(
    ("local_sizes", "found"), [((2,) * 4, Topology(2, 2)), ((1, 3, 3, 3), Topology(4, 1)), ((3,) * 4, Topology(4, 1))]
)
def test_unevenly_placed_ranks_count_as_one_node_each(
    ranks: Pools, local_sizes: tuple[int, ...], found: Topology
) -> None:
    assert ranks(4).run(topology_by, local_sizes) == [found] * 4


def wait_alone() -> None:
    """The first rank reduces over a group of the mesh, and the other one never comes."""
    mesh = build_mesh(ParallelConfig(dp_replicate_size=2), ClusterConfig(backend="gloo"))
    limit_waits(mesh, timedelta(seconds=1))
    if mesh.rank == 0:
        dist.all_reduce(torch.zeros(1), group=mesh.fsdp_mesh.get_group("dp_replicate"))


def test_in_training_every_group_times_out_for_a_missing_rank(ranks: Pools) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0[\s\S]*(Timed out|timed out|timeout)[\s\S]*1000 ?ms"):
        ranks(2).run(wait_alone, timeout_s=60.0)
    # A wait ends after whoever watches for hangs.
    limits = [step_timeout(ClusterConfig(hang_timeout_s=seconds)).total_seconds() for seconds in (None, 8.0, 3600.0)]
    assert limits == [600.0, 600.0, 7200.0]
