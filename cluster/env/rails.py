"""Rails: which port serves which GPU, and whether the rails of different nodes fit together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from cluster.env.facts import NodeEnvironment, Rail
from cluster.survey.adapters import HcaPort, natural
from cluster.survey.nvidia_smi import GpuAddress


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


def align_rails(environments: Mapping[str, NodeEnvironment]) -> dict[str, str]:
    """Warnings by node whose number of rails differs from that of most. NCCL joins rail k of one with rail k of the
    next; names may differ, as they do on sister machines with another order of slots."""
    counts = {node: len(environment.kept) for node, environment in environments.items()}
    votes = Counter(counts.values())
    usual = max(votes, key=lambda count: votes[count], default=0)
    is_usual = 2 * votes[usual] > votes.total()
    others = f"{usual} on most nodes" if is_usual else f"the nodes have {', '.join(map(str, sorted(votes)))}"
    return {
        node: f"{count} {'rail' if count == 1 else 'rails'}, {others}: a ring is as fast as its node with the fewest"
        for node, count in counts.items()
        if not is_usual or count != usual
    }


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
