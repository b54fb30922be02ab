"""What a plan of the environment rests on, and the plan itself; the facts of a node from the answer to its probe.

Of those what decides and cannot be read is an error, the rest a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import node_command
from cluster.survey.facts import NodeFacts
from cluster.survey.network import GPUDIRECT, LINKS, PORTS, HcaPort, NetInterface
from cluster.survey.nvidia_smi import LSPCI, SMI, GpuAddress
from cluster.survey.section import UnreadableError, listed, python_question


@dataclass(frozen=True)
class StorageRoute:
    """A network file system that the node has mounted, and the interface by which it reaches the server."""

    mount_point: str
    server: str
    interface: str


@dataclass(frozen=True)
class NodeEnvironmentFacts:
    """One node, as far as its environment depends on it.

    gateways: interfaces with a router behind them. interface: the one for sockets and rendezvous, if any;
    interface_reason: why it, or none. cores: CPUs of a login. has_gpudirect: whether adapters can read GPU memory
    themselves; None: not known. notes: what could not be read, in words.
    """

    node: str
    ports: tuple[HcaPort, ...] = ()
    interfaces: tuple[NetInterface, ...] = ()
    gpus: tuple[GpuAddress, ...] = ()
    interface: NetInterface | None = None
    interface_reason: str = ""
    gateways: frozenset[str] = frozenset()
    storage: tuple[StorageRoute, ...] = ()
    cores: int | None = None
    has_gpudirect: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def address(self) -> str | None:
        """The IPv4 address at which other nodes reach this one."""
        return self.interface.addresses[0].partition("/")[0] if self.interface is not None else None

    @property
    def no_address(self) -> str:
        """Why there is none, and what to do."""
        return f"no address for the other nodes: {self.interface_reason}; set cluster.interface"


@dataclass(frozen=True)
class HcaDecision:
    """Whether NCCL shall use one port, and why. is_fault: it is dropped for what may be mended: down, or slow."""

    port: HcaPort
    kept: bool
    reason: str
    is_fault: bool = False


@dataclass(frozen=True)
class Rail:
    """The port that is nearest to one GPU. found_by: what said so, in words."""

    gpu: int
    port: HcaPort
    found_by: str


@dataclass(frozen=True)
class EnvironmentVariable:
    """One environment variable of every rank on a node, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """A variable that was considered and is not set, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class NodeEnvironment:
    """The environment of the ranks on one node, and how it came about.

    hcas: every port of the node, kept ones first, in rail order (by the GPU that they serve). rails: by GPU index.
    """

    node: str
    variables: tuple[EnvironmentVariable, ...]
    left_out: tuple[LeftOut, ...] = ()
    hcas: tuple[HcaDecision, ...] = ()
    rails: tuple[Rail, ...] = ()
    interface: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[HcaPort, ...]:
        """The ports that NCCL shall use, in rail order."""
        return tuple(decision.port for decision in self.hcas if decision.kept)

    def value(self, name: str) -> str | None:
        """The value of a variable; None when the plan does not set it."""
        return next((variable.value for variable in self.variables if variable.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with these names as keys."""
        return {
            "node": self.node,
            "interface": self.interface,
            "variables": {variable.name: variable.value for variable in self.variables},
            "reasons": {variable.name: variable.reason for variable in self.variables},
            "left_out": {variable.name: variable.reason for variable in self.left_out},
            "hcas": [
                {
                    "port": decision.port.name,
                    "kept": decision.kept,
                    "reason": decision.reason,
                    "link_layer": decision.port.link_layer,
                    "rate_gbps": decision.port.rate_gbps,
                    "netdev": decision.port.netdev,
                }
                for decision in self.hcas
            ],
            "rails": [{"gpu": rail.gpu, "port": rail.port.name, "found_by": rail.found_by} for rail in self.rails],
            "warnings": list(self.warnings),
        }


# Servers of mounted network file systems, and the interface to each.
CARRIERS = python_question(
    "env.carriers",
    20,
    r"""
import subprocess

networked = re.compile(r"nfs4?|lustre|ceph|cifs|smb3|beegfs.*|(fuse\.)?glusterfs")
told = {"storage": [], "cores": len(os.sched_getaffinity(0))}
for source, folder, kind, options, *_ in mounts(root / "proc/mounts"):
    if networked.fullmatch(kind) and len(told["storage"]) < 32:
        given = re.search(r"(?:^|,)addr=([^,]*)", options)
        server = given[1] if given else re.split("[:@/,]", source.lstrip("/"))[0]
        route = subprocess.run(["ip", "-o", "-4", "route", "get", server], capture_output=True).stdout.decode()
        told["storage"] += [[folder, server, way] for way in re.findall(r"\bdev (\S+)", route)[:1] if way != "lo"]
print(json.dumps(told))
""",
)


ADAPTER_QUESTIONS = (PORTS, LSPCI, CARRIERS)


FACT_QUESTIONS = (*ADAPTER_QUESTIONS, GPUDIRECT, LINKS, SMI)


def read_facts(facts: NodeFacts, overrides: Sequence[str] = ()) -> NodeEnvironmentFacts:
    """What the node's environment depends on. overrides: see `node_command`.

    Raises ClusterError when adapters or interfaces cannot be read: a plan made without them would switch InfiniBand off
    on a node that has it.
    """
    probe = facts.probe
    try:
        found, network = adapter_facts(facts), facts.network
    except UnreadableError as error:
        look = node_command(probe.node, "check-nodes", "--only", "ib,net", overrides=overrides)
        raise ClusterError(
            f"{probe.node}: cannot tell what network it has: {error}{f' ({probe.trouble})' if probe.trouble else ''}. "
            f"Look at it with `{look}`"
        ) from error
    try:
        has_gpudirect = facts.gpudirect.works
    except UnreadableError:
        has_gpudirect = None
    return replace(
        found,
        interfaces=network.interfaces,
        interface=facts.interface.interface,
        interface_reason=facts.interface.reason,
        gateways=network.gateways,
        has_gpudirect=has_gpudirect,
    )


def adapter_facts(facts: NodeFacts) -> NodeEnvironmentFacts:
    """What decides which adapters ranks use, and no more; from `ADAPTER_QUESTIONS`. Raises UnreadableError."""
    found = NodeEnvironmentFacts(facts.node, facts.adapters.ports, gpus=facts.gpu_addresses)

    def take(told: Any) -> NodeEnvironmentFacts:
        storage = tuple(StorageRoute(*(one_line(word) for word in row)) for row in listed(told["storage"]))
        return replace(found, storage=storage, cores=int(told["cores"]))

    try:
        return facts.section(CARRIERS).read(take)
    except UnreadableError as error:
        return replace(found, notes=(f"ports that lead to storage servers are not known: {error}",))
