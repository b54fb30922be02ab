"""Rails within a node and across nodes."""

from __future__ import annotations

import pytest
from env_topologies import SISTERS, machine, port

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_fleet
from cluster.env.rails import map_rails, rail_order
from cluster.survey.adapters import HcaPort
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig


def gpu(index: int, path: str = "", numa: int | None = None) -> GpuAddress:
    return GpuAddress(index, tuple(path.split("/")) if path else (), numa)


def devices(gpus: list[GpuAddress], ports: list[HcaPort]) -> list[str]:
    return [rail.port.device for rail in map_rails(gpus, ports)]


def test_a_longer_common_path_beats_a_lower_number() -> None:
    ports = [port("mlx5_0", path="00:01/01:00/0a:00"), port("mlx5_1", path="00:01/01:00/02:00/0b:00")]
    assert devices([gpu(0, "00:01/01:00/02:00/0c:00")], ports) == ["mlx5_1"]


def test_paths_are_compared_from_the_root_not_anywhere() -> None:
    ports = [port("mlx5_0", path="00:09/01:00/02:00/0a:00"), port("mlx5_1", path="00:01/0b:00")]
    assert devices([gpu(0, "00:01/01:00/02:00/0c:00")], ports) == ["mlx5_1"]


def test_a_numa_node_decides_between_roots() -> None:
    ports = [port("mlx5_0", path="0000:40:01.0/a", numa=0), port("mlx5_1", path="0000:c0:01.0/b", numa=1)]
    assert devices([gpu(0, "0000:80:01.0/c", 1), gpu(1, "0000:00:01.0/d", 0)], ports) == ["mlx5_1", "mlx5_0"]


def test_equally_near_adapters_are_shared_out() -> None:
    ports = [port("mlx5_0", path="r/s/a"), port("mlx5_1", path="r/s/b")]
    assert devices([gpu(index, f"r/s/g{index}") for index in range(4)], ports) == ["mlx5_0", "mlx5_1"] * 2


def test_gpus_that_are_near_none_take_turns() -> None:
    assert devices([gpu(index) for index in range(4)], [port("mlx5_0"), port("mlx5_1")]) == ["mlx5_0", "mlx5_1"] * 2


def test_ports_are_ordered_by_the_first_gpu_they_serve_and_idle_ones_last() -> None:
    ports = [port("mlx5_0", path="r2/b"), port("mlx5_1", path="r1/a"), port("mlx5_2", path="r9/z")]
    rails = map_rails([gpu(0, "r1/x"), gpu(1, "r2/y")], ports)
    assert [one.device for one in rail_order(rails, ports)] == ["mlx5_1", "mlx5_0", "mlx5_2"]


def fleet(**changes: dict[str, object]) -> dict[str, NodeEnvironment]:
    return plan_fleet([machine(name, **changes.get(name, {})) for name in SISTERS], ClusterConfig())


def ports_with(name: str, device: str, **fields: object) -> tuple[HcaPort, ...]:
    from dataclasses import replace

    return tuple(replace(one, **fields) if one.device == device else one for one in machine(name).ports)


def test_a_node_with_a_dead_rail_is_named_and_the_others_are_not() -> None:
    environments = fleet(sister2={"ports": ports_with("sister2", "mlx5_4", state="DOWN")})
    (warning,) = environments["sister2"].warnings
    assert "7 rails, 8 on most nodes" in warning
    assert [name for name in SISTERS if environments[name].warnings] == ["sister2"]


def test_a_node_whose_rails_are_slower_is_named_gpu_by_gpu() -> None:
    slow = tuple(
        one if one.rate_gbps != 400 else ports_with("sister3", one.device, rate_gbps=200.0)[index]
        for index, one in enumerate(machine("sister3").ports)
    )
    environments = fleet(sister3={"ports": slow})
    assert "the rail of GPU 5 is 200 Gbit/s; on most nodes 400 Gbit/s" in environments["sister3"].warnings
    assert [name for name in SISTERS if environments[name].warnings] == ["sister3"]


def test_two_nodes_that_differ_are_both_told_for_neither_is_the_rule() -> None:
    names = ("a100_4nics", "h20_8nics")
    environments = plan_fleet([machine(name) for name in names], ClusterConfig())
    assert all(any("the nodes have 4, 8" in one for one in environments[name].warnings) for name in names)


def test_rails_shared_by_other_numbers_of_gpus_are_told() -> None:
    """As many ports, but on one node four of them sit where no GPU is near."""
    names = ("h20_8nics", "sister1", "sister3")
    crowded = machine("sister3")
    moved = tuple(type(one)(one.index, crowded.gpus[0].pci_path, 0) for one in crowded.gpus)
    facts = [machine(name) for name in names[:2]] + [machine("sister3", gpus=moved)]
    warnings = plan_fleet(facts, ClusterConfig())["sister3"].warnings
    assert any("shared by 8 GPUs; on most nodes 400 Gbit/s" in one for one in warnings)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_nodes_have_nothing_to_warn_of(count: int) -> None:
    facts = [machine("h100_12nics", node=f"node{index}") for index in range(count)]
    assert all(one.warnings == () for one in plan_fleet(facts, ClusterConfig()).values())
