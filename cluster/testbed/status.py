"""What of a testbed is up now, seen from this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cluster.testbed.machine import TestbedError
from cluster.testbed.node import Service, docker_answers, sshd_service
from cluster.testbed.slurm import slurm_states
from cluster.testbed.teardown import leftovers
from cluster.testbed.testbed import Node, load_testbed, state_root

_ANSWER_S = 1.0


@dataclass(frozen=True)
class NodeStatus:
    """One node. addresses: by interface. faults: those in force, in words. slurm: what Slurm says of it."""

    name: str
    addresses: dict[str, str]
    sshd: Service
    docker: Service
    faults: tuple[str, ...]
    slurm: str | None = None


@dataclass(frozen=True)
class TestbedStatus:
    """One testbed. complete: it stands whole; else `leftovers` says what there is."""

    __test__ = False

    name: str
    complete: bool
    folder: str
    nodes: tuple[NodeStatus, ...] = ()
    node_set: str = ""
    rails: int = 0
    rate: str | None = None
    hardware: str = "none"
    config_file: str | None = None
    ssh_config: str | None = None
    slurm_conf: str | None = None
    leftovers: tuple[str, ...] = ()


def read_status(name: str) -> TestbedStatus:
    """The testbed `name` as it is now; TestbedError when nothing of it is there. All nodes are asked at once."""
    folder = state_root() / name
    testbed = load_testbed(folder)
    if testbed is None or not testbed.stands:
        left = tuple(leftovers(name))
        if not left:
            raise TestbedError(f"no testbed {name} stands. Build it: burst testbed up --name {name}")
        return TestbedStatus(name, False, str(folder), leftovers=left)
    spec, slurm = testbed.spec, slurm_states(testbed) if testbed.spec.slurm else None
    with ThreadPoolExecutor(max_workers=len(testbed.nodes)) as pool:
        nodes = tuple(pool.map(lambda node: _node_status(node, slurm), testbed.nodes))
    return TestbedStatus(
        name=name,
        complete=True,
        folder=str(folder),
        nodes=nodes,
        node_set=spec.node_set,
        rails=spec.rails,
        rate=None if spec.rate_bits_per_s is None else f"{spec.rate_bits_per_s / 1e6:g}mbit",
        hardware=spec.hardware,
        config_file=testbed.config_file,
        ssh_config=str(testbed.ssh_config),
        slurm_conf=str(testbed.slurm_conf) if spec.slurm else None,
    )


def read_all(names: Iterable[str]) -> tuple[TestbedStatus, ...]:
    """The testbeds `names` as they are now, without those that somebody removed meanwhile."""
    found = []
    for name in names:
        with contextlib.suppress(TestbedError):
            found.append(read_status(name))
    return tuple(found)


def _node_status(node: Node, slurm: Mapping[str, str] | None) -> NodeStatus:
    return NodeStatus(
        name=node.name,
        addresses=node.addresses,
        sshd=sshd_service(node, _ANSWER_S),
        docker=Service.NONE if not node.testbed.spec.docker else Service.UP if docker_answers(node) else Service.DOWN,
        faults=tuple(map(str, node.testbed.faults.get(node.name, ()))),
        slurm=None if slurm is None else slurm.get(node.name, "no controller"),
    )
