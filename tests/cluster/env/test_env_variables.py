"""Each variable: when it is set, in which form, and what is never set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from env_topologies import interface, machine, node, port

from cluster.env.facts import NodeEnvironment
from cluster.env.plan import plan_environment
from cluster.survey.adapters import HcaPort
from cluster.survey.interfaces import NetInterface
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig


def roce(index: int) -> dict[str, object]:
    return {"link_layer": "Ethernet", "netdev": f"eth{index + 1}", "roce_v2": {3: f"10.{index}.0.1"}}


def rails(*networks: str) -> tuple[NetInterface, ...]:
    return tuple(interface(f"eth{index + 1}", addresses=(network,)) for index, network in enumerate(networks))


def left_out(environment: NodeEnvironment, name: str) -> str:
    return next(one.reason for one in environment.left_out if one.name == name)


ROCE = (port("mlx5_0", **roce(0)), port("mlx5_1", **roce(1)))
APART, GID = rails("10.0.0.1/24", "10.1.0.1/24"), "{}:0000:0000:0001:0002:c903:0000:0001"
CUT = "every rail is an IPv4 network of its own without a gateway: rails cannot cross"
NOT_KNOWN = "whether rails reach each other is not known (no IPv4 addresses); NCCL decides"
ONE_SUBNET = "all ports lie in one InfiniBand subnet, as far as their GIDs tell: rails may cross"


def subnets(*prefixes: str) -> tuple[HcaPort, ...]:
    gids = ({0: ("IB/RoCE v1", GID.format(prefix))} if prefix else {} for prefix in prefixes)
    return tuple(replace(port(f"mlx5_{index}"), gids=told) for index, told in enumerate(gids))


@pytest.mark.parametrize(
    ("ports", "gateways", "interfaces", "expected"),
    [
        (ROCE, frozenset(), APART, ("0", CUT)),
        (ROCE, frozenset({"eth0"}), APART, ("0", CUT)),
        (ROCE, frozenset({"eth1"}), APART, (None, "rails have gateways (eth1): they may cross")),
        (ROCE, frozenset(), rails("10.0.0.1/24"), (None, NOT_KNOWN)),
        (ROCE, frozenset(), rails("10.0.0.1/16", "10.0.1.1/16"), (None, "rails share IPv4 networks: they may cross")),
        (subnets("fe80", "fec0"), frozenset(), (), ("0", "the ports lie in 2 InfiniBand subnets: rails cannot cross")),
        (subnets("fe80", "fe80"), frozenset(), (), (None, ONE_SUBNET)),
        (subnets("fe80", "fec0", ""), frozenset(), (), (None, ONE_SUBNET)),
        (ROCE[:1], frozenset(), (), (None, "one rail: there is nothing to cross")),
    ],
)
def test_rails_that_cannot_cross_are_told_to_nccl(
    ports: tuple[HcaPort, ...],
    gateways: frozenset[str],
    interfaces: tuple[NetInterface, ...],
    expected: tuple[str | None, str],
) -> None:
    environment = node(*ports, gateways=gateways, interfaces=interfaces)
    (why,) = (x.reason for x in (*environment.variables, *environment.left_out) if x.name == "NCCL_CROSS_NIC")
    assert (environment.value("NCCL_CROSS_NIC"), why) == expected


def test_debug_files_go_into_the_run_folder_and_nowhere_without_one() -> None:
    told = [plan_environment(machine("h100_12nics"), ClusterConfig(), log_dir=log_dir) for log_dir in (None, "/logs")]
    without, into = ({one.name: one.value for one in environment.variables} for environment in told)
    assert into == without | {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": "/logs/nccl.%h.%p.log",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/flight_recorder_rank",
    }
    assert len(into) == len(without) + 5


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


def test_ranks_on_gloo_get_no_nccl_variables_and_the_flight_recorder() -> None:
    told = {}
    for config, gpus in ((ClusterConfig(backend="gloo"), 8), (ClusterConfig(), 0)):
        facts = machine("h100_12nics", gpus=machine("h100_12nics").gpus[:gpus])
        environment = plan_environment(facts, config, log_dir="/l")
        told[left_out(environment, "NCCL_*")] = [one.name for one in environment.variables]
    names = ["GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "OMP_NUM_THREADS"]
    whys = ("cluster.backend=gloo", "the node has no GPU")
    assert told == {f"{why}: ranks talk by gloo": names for why in whys}


def test_a_node_without_ports_has_infiniband_switched_off_and_says_why() -> None:
    def why(*ports: HcaPort) -> str:
        return next(one.reason for one in node(*ports).variables if one.name == "NCCL_IB_DISABLE")

    assert why() == "the node has no InfiniBand or RoCE port; NCCL uses sockets"
    reason = "mlx5_0:1: its link is not up: state INIT, LinkUp"
    assert why(port("mlx5_0", state="INIT")) == f"none of its ports will do: {reason}; NCCL uses sockets"


@pytest.mark.parametrize(
    ("facts", "warnings"),
    [
        (
            {"has_gpudirect": False},
            ["no GPUDirect RDMA (neither nvidia_peermem nor DMA-BUF): NCCL copies through host memory"],
        ),
        ({"has_gpudirect": None}, []),
        ({"has_gpudirect": True}, []),
        (
            {"interface": None, "interface_reason": "eth1, eth2 would do"},
            [
                "no network interface is chosen: eth1, eth2 would do; set cluster.interface to the one that reaches "
                "the other nodes"
            ],
        ),
        (
            {"ports": (port("mlx5_0", link_layer="Ethernet", netdev="eth1"),)},
            ["mlx5_0:1 has no GID of RoCE v2 over IPv4: give eth1 an address"],
        ),
    ],
)
def test_warnings(facts: dict[str, Any], warnings: list[str]) -> None:
    environment = node(port("mlx5_0"), **facts)
    assert list(environment.warnings) == warnings
    names = [one.name for one in (*environment.variables, *environment.left_out) if "IFNAME" in one.name]
    both = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
    assert names == (both if environment.interface else [", ".join(both)])
