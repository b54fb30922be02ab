"""What a plan of the environment rests on, and the plan itself. Values only: nothing here reads a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.survey.adapters import HcaPort
from cluster.survey.interfaces import NetInterface
from cluster.survey.nvidia_smi import GpuAddress


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
