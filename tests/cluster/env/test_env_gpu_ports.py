"""Which ports of full rate serve GPUs. The PCI trees are written by hand in the shape of DGX H100 and HGX B200: a PCI
switch for each GPU and its adapter, and others in slots of their own. Their bus numbers are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from env_topologies import node, port
from testkit.check_fakes import ask_here
from testkit.known_facts import known_facts

from cluster.env.plan import NodeEnvironment, plan_environment
from cluster.survey.drivers import GpuAddress
from cluster.survey.network import CARRIERS, Carriers, read_carriers
from cluster.survey.rdma import HcaPort
from engine.config.cluster import ClusterConfig, ContainerConfig, ExpectedHardware

# One PCI switch below each root port: upstream bridge, then a bridge for the GPU and one for its adapter.
ROOTS = [f"0000:{bus:02x}:01.0" for bus in (0x15, 0x26, 0x37, 0x48, 0x97, 0xA7, 0xB7, 0xC7)]
GPUS = tuple(
    GpuAddress(index, (root, f"{root[:7]}2:00.0", f"{root[:7]}3:00.0", f"{root[:7]}4:00.0"), index // 4)
    for index, root in enumerate(ROOTS)
)


def beside(name: str, gpu: int, **fields: Any) -> HcaPort:
    """An adapter below the PCI switch of a GPU."""
    root = ROOTS[gpu]
    return port(name, path=f"{root}/{root[:7]}2:00.0/{root[:7]}3:01.0/{root[:7]}5:00.0", numa=gpu // 4, **fields)


def elsewhere(name: str, bus: int, **fields: Any) -> HcaPort:
    """An adapter in a slot of its own."""
    return port(name, path=f"0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", numa=0, **fields)


RAILS = [beside(f"mlx5_{index}", index) for index in range(8)]
STORAGE = [elsewhere(f"mlx5_{8 + index}", 0x60 + 4 * index) for index in range(4)]


def plan(*ports: HcaPort, **facts: Any) -> NodeEnvironment:
    return node(*ports, **{"gpus": GPUS, **facts})


def names(environment: NodeEnvironment) -> list[str]:
    return [one.device for one in environment.kept]


@pytest.mark.parametrize(
    "others",
    [
        STORAGE[:2],  # DGX H100 with two ports of its storage adapters on InfiniBand
        STORAGE,  # all four
        [elsewhere(f"mlx5_{8 + index}", 0xE0 + 2 * index) for index in range(4)],  # NVSwitch bridges of HGX B200
        [elsewhere("mlx5_8", 0x01)],  # HGX with one adapter for storage
    ],
)
def test_ports_below_no_gpu_switch_are_dropped(others: list[HcaPort]) -> None:
    assert names(plan(*RAILS, *others)) == [one.device for one in RAILS]


def test_reason_names_what_serves_no_gpu() -> None:
    reasons = {one.port.device: one.reason for one in plan(*RAILS, *STORAGE).hcas if not one.kept}
    assert reasons.keys() == {"mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"}
    assert "serves no GPU" in reasons["mlx5_8"]


def test_all_ports_stay_where_a_gpu_has_none_of_its_own() -> None:
    ports = [*RAILS[:7], *STORAGE[:1]]
    assert set(names(plan(*ports))) == {one.device for one in ports}


def test_two_gpus_below_one_switch_share_its_ports() -> None:
    gpus = [GpuAddress(index, (*GPUS[index // 2 * 2].pci_path[:3], f"0000:{index:02x}:00.0")) for index in range(8)]
    ports = [beside(f"mlx5_{index}", index // 2 * 2) for index in range(8)]
    assert names(plan(*ports, *STORAGE, gpus=tuple(gpus))) == [one.device for one in ports]


def test_all_ports_stay_where_the_bus_is_flat() -> None:
    # Virtual machines of Azure and others: every device is on a bus of its own, without a bridge above it.
    gpus = tuple(GpuAddress(index, (f"000{index}:00:00.0",)) for index in range(8))
    ports = [port(f"mlx5_{index}", path=f"01{index:02x}:00:00.0") for index in range(9)]
    assert len(names(plan(*ports, gpus=gpus))) == 9


def test_configured_count_keeps_ports_without_gpu() -> None:
    config = ClusterConfig(expected=ExpectedHardware(hcas=12))
    assert len(names(plan(*RAILS, *STORAGE, config=config))) == 12


AZURE = Carriers(cores=96, topology="/opt/microsoft/ndv5-topo.xml", has_topology=True)


def topology(carriers: Carriers, **container: Any) -> NodeEnvironment:
    """The plan where ranks run in a container of those settings, or without one."""
    config = ClusterConfig(container=ContainerConfig(runtime="docker" if container else "bare", **container))
    facts = known_facts("node1", ports=RAILS, gpus=GPUS)
    facts.__dict__["carriers"] = carriers
    return plan_environment(facts, config)


@pytest.mark.parametrize("container", [{}, {"mounts": ("/opt/microsoft",)}])
def test_topology_file_of_the_node_is_kept_where_ranks_see_it(container: dict[str, Any]) -> None:
    # As Azure's images for its ND series set it in /etc/nccl.conf.
    assert topology(AZURE, **container).value("NCCL_TOPO_FILE") == "/opt/microsoft/ndv5-topo.xml"


def test_topology_file_that_containers_lack_is_warned_of() -> None:
    environment = topology(AZURE, mounts=("/opt/micro",))
    assert environment.value("NCCL_TOPO_FILE") is None
    assert any("add /opt/microsoft to cluster.container.mounts" in text for text in environment.warnings)


def test_topology_file_that_the_node_lacks_is_warned_of() -> None:
    assert any("has no such file" in text for text in topology(replace(AZURE, has_topology=False)).warnings)


def test_topology_file_is_found_in_the_configuration_of_nccl(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE=/opt/topo.xml\n")
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/topo.xml").write_text("<system/>")
    carriers = read_carriers(ask_here([CARRIERS], tmp_path, BURST_PROBE_ROOT=str(tmp_path)).section(CARRIERS.name))
    assert (carriers.topology, carriers.has_topology) == ("/opt/topo.xml", True)


def test_iwarp_is_no_roce_for_nccl() -> None:
    lone = node(port("irdma0", link_layer="Ethernet", is_iwarp=True))
    assert lone.value("NCCL_IB_DISABLE") == "1"
    assert "iWARP" in lone.hcas[0].reason
