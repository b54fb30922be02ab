"""What of a testbed is up now, seen from this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cluster.testbed.build import Testbed
from cluster.testbed.folder import TestbedError, folder_of
from cluster.testbed.node import Node, Service
from cluster.testbed.spec import format_rate
from cluster.testbed.teardown import leftovers

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
    folder = folder_of(name)
    state = folder.load()
    testbed = None if state is None or not state.complete else Testbed(folder, state)
    if testbed is None or not all(node.stands for node in testbed.nodes):
        left = tuple(leftovers(name))
        if not left:
            raise TestbedError(f"no testbed {name} stands. Build it: burst testbed up --name {name}")
        return TestbedStatus(name, False, str(folder.path), leftovers=left)
    slurm = None if testbed.slurm is None else testbed.slurm.node_states()
    with ThreadPoolExecutor(max_workers=len(testbed.nodes)) as pool:
        nodes = tuple(pool.map(lambda node: _node_status(node, slurm), testbed.nodes))
    state, spec = testbed.state, testbed.state.spec
    return TestbedStatus(
        name=name,
        complete=True,
        folder=str(folder.path),
        nodes=nodes,
        node_set=spec.node_set,
        rails=spec.rails,
        rate=None if spec.rate_bits_per_s is None else format_rate(spec.rate_bits_per_s),
        hardware=spec.hardware,
        config_file=state.config_file,
        ssh_config=str(folder.ssh_config),
        slurm_conf=str(folder.slurm_conf) if spec.slurm else None,
    )


def read_all(names: Iterable[str]) -> tuple[TestbedStatus, ...]:
    """The testbeds `names` as they are now, without those that somebody removed meanwhile."""
    found = []
    for name in names:
        with contextlib.suppress(TestbedError):
            found.append(read_status(name))
    return tuple(found)


def _node_status(node: Node, slurm: Mapping[str, str] | None) -> NodeStatus:
    spec, network = node.state.spec, node.state.network
    return NodeStatus(
        name=node.name,
        addresses={interface: network.address(node.name, interface) for interface in spec.interfaces},
        sshd=node.sshd_service(_ANSWER_S),
        docker=Service.NONE if not spec.docker else Service.UP if node.docker_answers() else Service.DOWN,
        faults=tuple(str(fault) for fault in node.state.faults.get(node.name, ())),
        slurm=None if slurm is None else slurm.get(node.name, "no controller"),
    )
