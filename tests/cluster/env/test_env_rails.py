"""Rails within a node and across nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from env_topologies import SISTERS, machine, port

from cluster.env.facts import NodeEnvironmentFacts
from cluster.env.hcas import map_rails, rail_order
from cluster.env.plan import plan_fleet
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig

TURNS = "taking turns, for no port is nearer than another"


@pytest.mark.parametrize(
    ("ports", "gpus", "rails", "found_by"),
    [
        (["r:1/b/x", "r:1/b/c/y"], ["r:1/b/c/g"], "1", "the longest common PCI path (3 bridges)"),
        (["r:9/b/c/x", "r:1/y"], ["r:1/b/c/g"], "1", "the longest common PCI path (1 bridge)"),  # from the root
        (["r:1/x", "q:1/y"], ["q:2/g"], "1", "the same PCI host bridge"),
        (["r:1/x 1", "q:1/y 0"], ["s:1/g 0", "t:1/h 1"], "1 0", "the same NUMA node"),
        (["r:1/s/x", "r:1/s/y"], ["r:1/s/g", "r:1/s/h", "r:1/s/i"], "0 1 0", "the longest common PCI path (2 bridges)"),
        (["", ""], ["", "", ""], "0 1 0", TURNS),
        ([], [""], "", ""),
    ],
)
def test_a_gpu_gets_the_nearest_port(ports: list[str], gpus: list[str], rails: str, found_by: str) -> None:
    def place(text: str) -> tuple[tuple[str, ...], int | None]:
        path, _, numa = text.partition(" ")
        return tuple(filter(None, path.split("/"))), int(numa) if numa else None

    places = [GpuAddress(index, *place(text)) for index, text in reversed([*enumerate(gpus)])]
    adapters = [replace(port(f"mlx5_{at}"), **dict(zip(("pci_path", "numa_node"), place(text), strict=True)))
                for at, text in enumerate(ports)]  # fmt: skip
    found = map_rails(places, adapters)
    assert " ".join(rail.port.device.removeprefix("mlx5_") for rail in found) == rails
    assert {rail.found_by for rail in found} <= {found_by}
    assert [rail.gpu for rail in found] == [*range(len(found))]


def test_ports_are_ordered_by_the_first_gpu_they_serve_and_idle_ones_last() -> None:
    ports = [port("mlx5_2"), port("mlx5_0", path="r2/b"), port("mlx5_1", path="r1/a"), port("mlx5_10"), port("mlx5_9")]
    rails = map_rails([GpuAddress(0, ("r1", "x")), GpuAddress(1, ("r2", "y"))], ports)
    assert [one.device for one in rail_order(rails, ports)] == ["mlx5_1", "mlx5_0", "mlx5_2", "mlx5_9", "mlx5_10"]


DEAD = machine("sister2", ports=tuple(replace(one, state="DOWN") if one.device == "mlx5_4" else one
                                      for one in machine("sister2").ports))  # fmt: skip
SLOWEST = "a ring is as fast as its node with the fewest"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([machine(name) for name in SISTERS], {}),
        *(([machine("h100_12nics", node=f"n{index}") for index in range(count)], {}) for count in (1, 2)),
        ([machine("sister1"), DEAD, machine("sister3")], {"sister2": (f"7 rails, 8 on most nodes: {SLOWEST}",)}),
        (  # neither is the rule
            [machine("a100_4nics"), machine("h20_8nics")],
            {
                "a100_4nics": (f"4 rails, the nodes have 4, 8: {SLOWEST}",),
                "h20_8nics": (f"8 rails, the nodes have 4, 8: {SLOWEST}",),
            },
        ),
    ],
)
def test_nodes_whose_rails_differ_from_those_of_most_are_told(
    facts: list[NodeEnvironmentFacts], expected: dict[str, tuple[str, ...]]
) -> None:
    found = plan_fleet(facts, ClusterConfig())
    assert {name: one.warnings for name, one in found.items() if one.warnings} == expected
