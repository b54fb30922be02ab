"""Rails: which port serves which GPU, and whether the rails of different nodes fit together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from cluster.env.facts import NodeEnvironment, Rail
from cluster.survey.adapters import HcaPort, natural
from cluster.survey.nvidia_smi import GpuAddress

_T = TypeVar("_T")


def map_rails(gpus: Sequence[GpuAddress], ports: Sequence[HcaPort]) -> tuple[Rail, ...]:
    """The nearest port of every GPU, by GPU index.

    Nearest is the longest common PCI path, then the same host bridge, then the same NUMA node. Of equally near ports
    the one that serves fewest GPUs so far is taken, in the order of their numbers, so that two GPUs behind one switch
    with two adapters get one each.
    """
    rails: list[Rail] = []
    used: Counter[str] = Counter()
    for gpu in sorted(gpus, key=lambda gpu: gpu.index) if ports else ():
        best = max(_nearness(gpu, port) for port in ports)
        nearest = [port for port in ports if _nearness(gpu, port) == best]
        port = min(nearest, key=lambda port: (used[port.name], natural(port.name)))
        used[port.name] += 1
        rails.append(Rail(gpu.index, port, _found_by(best)))
    return tuple(rails)


def rail_order(rails: Sequence[Rail], ports: Sequence[HcaPort]) -> tuple[HcaPort, ...]:
    """The ports by the first GPU that each serves; those that serve none last, by number."""
    first: dict[str, int] = {}
    for rail in rails:
        first.setdefault(rail.port.name, rail.gpu)
    last = len(rails) + max(first.values(), default=0)
    return tuple(sorted(ports, key=lambda port: (first.get(port.name, last + 1), natural(port.name))))


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


def _nearness(gpu: GpuAddress, port: HcaPort) -> tuple[int, bool, bool]:
    """How near they are, larger is nearer: PCI bridges above both, same PCI host bridge, same NUMA node."""
    pairs = zip(gpu.pci_path, port.pci_path, strict=False)
    bridges = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    roots = {path[0].rpartition(":")[0] if path else None for path in (gpu.pci_path, port.pci_path)}
    same_root = len(roots) == 1 and None not in roots
    return bridges, same_root, same_root or (gpu.numa_node is not None and gpu.numa_node == port.numa_node)


def _found_by(nearness: tuple[int, bool, bool]) -> str:
    bridges, same_root, same_numa_node = nearness
    if bridges:
        return f"the longest common PCI path ({bridges} {'bridge' if bridges == 1 else 'bridges'})"
    if same_root:
        return "the same PCI host bridge"
    return "the same NUMA node" if same_numa_node else "taking turns, for no port is nearer than another"


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
