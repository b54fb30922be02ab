"""Rails within a node and across nodes."""

from __future__ import annotations

import pytest
from env_topologies import SISTERS, machine, port, topology_text

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_fleet
from cluster.env.rails import map_rails, rail_order
from cluster.parse.fabric import GpuAddress, HcaPort
from cluster.parse.topology import parse_topology
from engine.config_cluster import ClusterConfig


def gpu(index: int, path: str = "", numa: int | None = None) -> GpuAddress:
    return GpuAddress(index, tuple(path.split("/")) if path else (), numa)


def devices(gpus: list[GpuAddress], ports: list[HcaPort], topology: str | None = None) -> list[str]:
    rails, _ = map_rails(gpus, ports, parse_topology(topology) if topology else None)
    return [rail.port.device for rail in rails]


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


def test_no_ports_make_no_rails() -> None:
    assert map_rails([gpu(0, "r/a")], [], None) == ((), ())


MATRIX = (
    "\tGPU0\tmlx5_0\tmlx5_1\tCPU Affinity\nGPU0\t X \tNODE\tPIX\t0-7\nmlx5_0\tNODE\t X \tNODE\nmlx5_1\tPIX\tNODE\t X \n"
)


def test_where_topo_disagrees_with_pci_paths_a_warning_names_both() -> None:
    ports = [port("mlx5_0", path="r/s/a"), port("mlx5_1", path="q/b")]
    rails, warnings = map_rails([gpu(0, "r/s/g")], ports, parse_topology(MATRIX))
    assert rails[0].port.device == "mlx5_0"
    assert warnings == (
        "GPU 0: PCI paths say mlx5_0:1, nvidia-smi topo -m calls mlx5_1:1 nearer (PIX, against NODE); "
        "the PCI path decides",
    )


def test_where_paths_tell_nothing_apart_topo_decides() -> None:
    ports = [port("mlx5_0", path="0000:10:1/a"), port("mlx5_1", path="0000:20:1/b")]
    rails, warnings = map_rails([gpu(0, "0000:30:1/g")], ports, parse_topology(MATRIX))
    assert (rails[0].port.device, warnings) == ("mlx5_1", ())
    assert rails[0].found_by == "nvidia-smi topo -m: PIX, below the same PCIe bridge"


def test_an_adapter_that_topo_does_not_show_is_a_warning() -> None:
    _, warnings = map_rails([gpu(0, "r/g")], [port("mlx5_7", path="r/a")], parse_topology(MATRIX))
    assert "does not show mlx5_7 beside GPU 0" in warnings[0]


def test_dropped_ports_are_no_rails_even_when_topo_calls_them_nearest() -> None:
    topology = parse_topology(topology_text("h100_12nics"))
    only = [port("mlx5_9")]
    rails, _ = map_rails([gpu(0)], only, topology)
    assert rails[0].port.device == "mlx5_9"


def test_ports_are_ordered_by_the_first_gpu_they_serve_and_idle_ones_last() -> None:
    ports = [port("mlx5_0", path="r2/b"), port("mlx5_1", path="r1/a"), port("mlx5_2", path="r9/z")]
    rails, _ = map_rails([gpu(0, "r1/x"), gpu(1, "r2/y")], ports, None)
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
    facts = [machine(name) for name in names[:2]] + [machine("sister3", gpus=moved, topology=None)]
    warnings = plan_fleet(facts, ClusterConfig())["sister3"].warnings
    assert any("shared by 8 GPUs; on most nodes 400 Gbit/s" in one for one in warnings)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equal_nodes_have_nothing_to_warn_of(count: int) -> None:
    facts = [machine("h100_12nics", node=f"node{index}") for index in range(count)]
    assert all(one.warnings == () for one in plan_fleet(facts, ClusterConfig()).values())
