"""Rails: which port serves which GPU, and whether the rails of different nodes fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.env.facts import NodeEnvironment, Rail
from cluster.env.hcas import port_order
from cluster.parse.fabric import GpuAddress, HcaPort
from cluster.parse.topology import GpuTopology, Nearness

_T = TypeVar("_T")
_WORDS = {
    Nearness.PIX: "below the same PCIe bridge",
    Nearness.PXB: "below the same PCIe bridges",
    Nearness.PHB: "below the same host bridge",
    Nearness.NODE: "on the same NUMA node",
    Nearness.SYS: "on another NUMA node",
}


@dataclass(frozen=True)
class _Closeness:
    """How near a port is to a GPU: larger is nearer. steps: PCI bridges that both lie below."""

    steps: int
    same_host_bridge: bool
    same_numa_node: bool

    @property
    def key(self) -> tuple[int, bool, bool]:
        return self.steps, self.same_host_bridge, self.same_numa_node

    @property
    def found_by(self) -> str:
        if self.steps:
            return f"the longest common PCI path ({self.steps} {'bridge' if self.steps == 1 else 'bridges'})"
        if self.same_host_bridge:
            return "the same PCI host bridge"
        return "the same NUMA node" if self.same_numa_node else "taking turns, for no port is nearer than another"


def map_rails(
    gpus: Sequence[GpuAddress], ports: Sequence[HcaPort], topology: GpuTopology | None
) -> tuple[tuple[Rail, ...], tuple[str, ...]]:
    """(the nearest port of every GPU, by GPU index; warnings where nvidia-smi topo -m disagrees).

    Nearest is the longest common PCI path, then the same host bridge, then the same NUMA node. Of equally near ports
    the one that serves fewest GPUs so far is taken, in the order of their numbers, so that two GPUs behind one switch
    with two adapters get one each. Where addresses are not known, nvidia-smi topo -m decides.
    """
    rails: list[Rail] = []
    warnings: list[str] = []
    used: Counter[str] = Counter()
    ordered = sorted(ports, key=port_order)
    for gpu in sorted(gpus, key=lambda gpu: gpu.index) if ordered else ():
        by_topology = _by_topology(gpu, ordered, topology)
        nearest = _nearest(gpu, ordered)
        if by_topology and not (gpu.pci_path and any(port.pci_path for port in ordered)):
            nearest = by_topology
        agreed = [port for port in nearest if port in by_topology]
        port = _least_used(agreed or nearest, used)
        used[port.name] += 1
        rails.append(Rail(gpu.index, port, _found_by(gpu, port, agreed, nearest, topology)))
        if topology is not None and by_topology and not agreed:
            warnings += _disagreement(gpu, port, by_topology[0], topology)
    return tuple(rails), (*warnings, *_unseen(rails, topology))


def rail_order(rails: Sequence[Rail], ports: Sequence[HcaPort]) -> tuple[HcaPort, ...]:
    """The ports by the first GPU that each serves; those that serve none last, by number."""
    first: dict[str, int] = {}
    for rail in rails:
        first.setdefault(rail.port.name, rail.gpu)
    last = len(rails) + max(first.values(), default=0)
    return tuple(sorted(ports, key=lambda port: (first.get(port.name, last + 1), port_order(port))))


def align_rails(environments: Mapping[str, NodeEnvironment]) -> dict[str, tuple[str, ...]]:
    """Warnings by node: whose rails differ from those of most nodes. NCCL joins rail k of one with rail k of the next.

    Compared are the number of ports and, GPU by GPU, the rate of its port and how many GPUs share it; names may differ,
    as they do on sister machines with another order of slots.
    """
    counts = {node: len(environment.kept) for node, environment in environments.items()}
    usual = _most(counts.values())
    warnings: dict[str, list[str]] = {node: [] for node in environments}
    every = ", ".join(str(count) for count in sorted(set(counts.values())))
    for node, count in counts.items():
        if count != usual:
            others = f"{usual} on most nodes" if usual is not None else f"the nodes have {every}"
            warnings[node].append(
                f"{count} {'rail' if count == 1 else 'rails'}, {others}: a ring is as fast as its node with the fewest"
            )
    profiles = {node: _profile(environment) for node, environment in environments.items()}
    for gpu in sorted({gpu for profile in profiles.values() for gpu in profile}):
        usual_rail = _most(profile[gpu] for profile in profiles.values() if gpu in profile)
        for node, profile in profiles.items():
            # A node with another number of rails has other shares, which the line above already explains.
            if counts[node] == usual and gpu in profile and profile[gpu] != usual_rail and usual_rail is not None:
                warnings[node].append(
                    f"the rail of GPU {gpu} is {_rail_text(profile[gpu])}; on most nodes {_rail_text(usual_rail)}"
                )
    return {node: tuple(lines) for node, lines in warnings.items()}


def _nearest(gpu: GpuAddress, ports: Sequence[HcaPort]) -> list[HcaPort]:
    best = max(_closeness(gpu, port).key for port in ports)
    return [port for port in ports if _closeness(gpu, port).key == best]


def _closeness(gpu: GpuAddress, port: HcaPort) -> _Closeness:
    steps = 0
    for one, other in zip(gpu.pci_path, port.pci_path, strict=False):
        if one != other:
            break
        steps += 1
    bridges = {path[0].rpartition(":")[0] for path in (gpu.pci_path, port.pci_path) if path}
    same_host_bridge = len(bridges) == 1 and bool(gpu.pci_path and port.pci_path)
    same_numa_node = gpu.numa_node is not None and gpu.numa_node == port.numa_node
    return _Closeness(steps, same_host_bridge, same_numa_node or same_host_bridge)


def _by_topology(gpu: GpuAddress, ports: Sequence[HcaPort], topology: GpuTopology | None) -> list[HcaPort]:
    """The ports that nvidia-smi calls nearest; none when it does not show them."""
    known = {port.name: near for port in ports if (near := _between(topology, gpu, port)) is not None}
    best = min(known.values(), default=None)
    return [port for port in ports if known.get(port.name) == best] if best is not None else []


def _between(topology: GpuTopology | None, gpu: GpuAddress, port: HcaPort) -> Nearness | None:
    return topology.between(gpu.index, port.device) if topology is not None else None


def _found_by(
    gpu: GpuAddress, port: HcaPort, agreed: Sequence[HcaPort], nearest: Sequence[HcaPort], topology: GpuTopology | None
) -> str:
    """What told the port from others: the addresses, else nvidia-smi, else nothing."""
    closeness = _closeness(gpu, port)
    near = _between(topology, gpu, port)
    by_topology = (agreed and not (gpu.pci_path and port.pci_path)) or 0 < len(agreed) < len(nearest)
    if by_topology and near is not None and not any(closeness.key):
        return f"nvidia-smi topo -m: {near.name}, {_WORDS.get(near, 'nearest')}"
    return closeness.found_by


def _disagreement(gpu: GpuAddress, port: HcaPort, other: HcaPort, topology: GpuTopology) -> list[str]:
    """Why nvidia-smi's choice is not taken; nothing when it does not show ours, which `_unseen` tells."""
    here, there = _between(topology, gpu, port), _between(topology, gpu, other)
    if here is None or there is None:
        return []
    return [
        f"GPU {gpu.index}: PCI paths say {port.name}, nvidia-smi topo -m calls {other.name} nearer "
        f"({there.name}, against {here.name}); the PCI path decides"
    ]


def _unseen(rails: Sequence[Rail], topology: GpuTopology | None) -> list[str]:
    """One warning for all rails whose adapter nvidia-smi does not show."""
    if topology is None:
        return []
    odd = [rail for rail in rails if topology.between(rail.gpu, rail.port.device) is None]
    if not odd:
        return []
    devices = ", ".join(dict.fromkeys(rail.port.device for rail in odd))
    gpus = ", ".join(str(rail.gpu) for rail in odd)
    return [f"nvidia-smi topo -m does not show {devices} beside GPU {gpus}; the PCI path decides there"]


def _least_used(ports: Sequence[HcaPort], used: Mapping[str, int]) -> HcaPort:
    return min(ports, key=lambda port: (used.get(port.name, 0), port_order(port)))


def _profile(environment: NodeEnvironment) -> dict[int, tuple[float | None, int]]:
    """GPU index -> (rate of its port, how many GPUs share that port)."""
    shares = Counter(rail.port.name for rail in environment.rails)
    return {rail.gpu: (rail.port.rate_gbps, shares[rail.port.name]) for rail in environment.rails}


def _rail_text(rail: tuple[float | None, int]) -> str:
    rate, shared_by = rail
    speed = "of unknown rate" if rate is None else f"{rate:g} Gbit/s"
    return speed if shared_by == 1 else f"{speed}, shared by {shared_by} GPUs"


def _most(values: Iterable[_T]) -> _T | None:
    """The value that more than half of `values` have; None when there is no such value."""
    counts = Counter(values)
    value, count = counts.most_common(1)[0] if counts else (None, 0)
    return value if 2 * count > counts.total() else None
