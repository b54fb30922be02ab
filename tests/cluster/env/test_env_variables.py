"""Each variable: when it is set, in which form, and what is never set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from env_topologies import interface, machine, node, port

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_environment
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig


def roce(index: int) -> dict[str, object]:
    return {"link_layer": "Ethernet", "netdev": f"eth{index + 1}", "roce_v2": {3: f"10.{index}.0.1"}}


def rails(*networks: str) -> tuple[object, ...]:
    return tuple(interface(f"eth{index + 1}", addresses=(network,)) for index, network in enumerate(networks))


def left_out(environment: NodeEnvironment, name: str) -> str:
    return next(one.reason for one in environment.left_out if one.name == name)


def test_a_name_that_begins_like_another_does_not_bring_it_in() -> None:
    """As NCCL reads the list: without `=` it takes every name that begins so, and mlx5_1 brings in a dead mlx5_10."""
    ports = [port("mlx5_1"), port("mlx5_10", state="DOWN")]
    value = node(*ports).value("NCCL_IB_HCA")
    assert value == "=mlx5_1:1"
    assert [one.name for one in ports if _nccl_takes(value, one.name)] == ["mlx5_1:1"]
    assert [one.device for one in ports if _nccl_takes("mlx5_1", one.device)] == ["mlx5_1", "mlx5_10"]


def _nccl_takes(value: str, port_name: str) -> bool:
    wanted = value.removeprefix("=").split(",")
    return port_name in wanted if value.startswith("=") else any(port_name.startswith(one) for one in wanted)


def test_roce_without_an_ipv4_address_is_a_warning() -> None:
    environment = node(port("mlx5_0", link_layer="Ethernet", netdev="eth1"))
    assert any("mlx5_0:1 has no GID of RoCE v2 over IPv4" in warning for warning in environment.warnings)


def test_rails_in_networks_of_their_own_without_gateway_cannot_cross() -> None:
    ports = (port("mlx5_0", **roce(0)), port("mlx5_1", **roce(1)))
    known = {"interfaces": rails("10.0.0.1/24", "10.1.0.1/24")}
    assert node(*ports, gateways=frozenset(), **known).value("NCCL_CROSS_NIC") == "0"
    assert "not known" in left_out(node(*ports, gateways=None, **known), "NCCL_CROSS_NIC")
    there = left_out(node(*ports, gateways=frozenset({"eth1"}), **known), "NCCL_CROSS_NIC")
    assert "rails have gateways (eth1)" in there
    assert node(*ports, gateways=frozenset({"eth0"}), **known).value("NCCL_CROSS_NIC") == "0"


def test_rails_in_one_network_may_cross() -> None:
    ports = (port("mlx5_0", **roce(0)), port("mlx5_1", **roce(1)))
    environment = node(*ports, gateways=frozenset(), interfaces=rails("10.0.0.1/16", "10.0.1.1/16"))
    assert "share IPv4 networks" in left_out(environment, "NCCL_CROSS_NIC")


def test_infiniband_subnets_tell_whether_rails_cross() -> None:
    default, other = "fe80:0000:0000:0000:0002:c903:0000:000{}", "fec0:0000:0000:0001:0002:c903:0000:000{}"
    one = replace(port("mlx5_0"), gids={0: ("IB/RoCE v1", default.format(1))})
    same = replace(port("mlx5_1"), gids={0: ("IB/RoCE v1", default.format(2))})
    apart = replace(port("mlx5_1"), gids={0: ("IB/RoCE v1", other.format(2))})
    assert node(one, apart).value("NCCL_CROSS_NIC") == "0"
    near = replace(port("mlx5_0"), gids={0: ("IB/RoCE v1", other.replace("0001", "0002", 1).format(1))})
    assert node(near, apart).value("NCCL_CROSS_NIC") == "0"
    assert "one InfiniBand subnet" in left_out(node(one, same), "NCCL_CROSS_NIC")
    assert node(one, port("mlx5_1")).value("NCCL_CROSS_NIC") is None


def test_debug_files_go_into_the_run_folder_and_nowhere_without_one() -> None:
    facts = machine("h100_12nics")
    environment = plan_environment(facts, ClusterConfig(), log_dir="/runs/a/logs")
    assert environment.value("NCCL_DEBUG_FILE") == "/runs/a/logs/nccl.%h.%p.log"
    assert environment.value("TORCH_FR_DUMP_TEMP_FILE") == "/runs/a/logs/flight_recorder_rank"
    assert environment.value("TORCH_FR_BUFFER_SIZE") == "2000"
    without = plan_environment(facts, ClusterConfig())
    assert not [one.name for one in without.variables if "DEBUG" in one.name or "_FR_" in one.name]


def test_threads_are_cores_over_ranks_unless_configured() -> None:
    def threads(cores: int, gpus: int = 4, **cluster: int) -> tuple[str, str]:
        places = tuple(GpuAddress(index) for index in range(gpus))
        found = node(gpus=places, cores=cores, config=ClusterConfig(**cluster)).variables[-1]
        return f"{found.name}={found.value}", found.reason

    assert threads(30) == ("OMP_NUM_THREADS=7", "30 cores for 4 ranks")
    assert threads(2) == ("OMP_NUM_THREADS=1", "2 cores for 4 ranks")
    assert threads(6, gpus=0) == ("OMP_NUM_THREADS=6", "6 cores for 1 rank")
    assert threads(30, ranks_per_node=2) == ("OMP_NUM_THREADS=15", "30 cores for 2 ranks")
    assert threads(30, threads_per_rank=3) == ("OMP_NUM_THREADS=3", "cluster.threads_per_rank=3")
    assert left_out(node(cores=None), "OMP_NUM_THREADS") == "the number of cores is not known"


@pytest.mark.parametrize("config", [ClusterConfig(backend="gloo"), ClusterConfig()])
def test_ranks_on_gloo_get_no_nccl_variables(config: ClusterConfig) -> None:
    gpus = (GpuAddress(0),) if config.backend == "gloo" else ()
    environment = node(port("mlx5_0"), gpus=gpus, config=config)
    assert [one.name for one in environment.variables] == ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    assert "ranks talk by gloo" in left_out(environment, "NCCL_*")


def test_without_an_interface_none_is_named_and_a_warning_says_why() -> None:
    environment = node(interface=None, interface_reason="eth1, eth2 would do and none has the default route")
    assert environment.value("NCCL_SOCKET_IFNAME") is None
    assert environment.value("GLOO_SOCKET_IFNAME") is None
    assert any("eth1, eth2 would do" in warning and "cluster.interface" in warning for warning in environment.warnings)


def test_no_way_into_gpu_memory_is_a_warning_only_when_certain() -> None:
    text = "no GPUDirect RDMA (neither nvidia_peermem nor DMA-BUF): NCCL copies through host memory"
    assert [node(port("mlx5_0"), has_gpudirect=known).warnings for known in (False, True, None)] == [(text,), (), ()]
