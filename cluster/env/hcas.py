"""Which ports of a node NCCL shall use, which of them serves which GPU, and whether these rails of nodes fit together.

Every port gets a decision and its reason; nothing is dropped silently.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.env.facts import HcaDecision, NodeEnvironment, NodeEnvironmentFacts, Rail
from cluster.survey.adapters import HcaPort, natural
from cluster.survey.nvidia_smi import GpuAddress
from engine.config.cluster import ClusterConfig

INFINIBAND = "InfiniBand"
# A link reports 100, 200, 400 or 800; what is within this of another rate is the same rate.
_RATE_TOLERANCE_GBPS = 0.5


def choose_hcas(facts: NodeEnvironmentFacts, config: ClusterConfig) -> tuple[tuple[HcaDecision, ...], tuple[str, ...]]:
    """(a decision for every port, in the order of their numbers; warnings).

    A port stays when its link is up, it is neither a virtual function nor a bond, nor on the way to the default route
    or a storage server while ranks can do without it, has the link layer with most bandwidth, and the rate of the
    fastest (or at least cluster.expected.hca_rate_gbps). Virtual functions stay where a node has nothing else, as in a
    virtual machine, and bonds where they are most of the network.
    """
    sieve = _Sieve(sorted(facts.ports, key=lambda port: natural(port.name)))
    sieve.drop(_link_trouble, is_fault=True)
    _drop_virtual_functions(sieve)
    _drop_bonds(sieve)
    _drop_carriers(sieve, facts, config)
    _drop_other_layers(sieve)
    _drop_slow(sieve, config)
    return sieve.decisions(), tuple(sieve.warnings)


class _Sieve:
    """Ports still in, and why the others are out."""

    def __init__(self, ports: Sequence[HcaPort]) -> None:
        self._ports = ports
        self._dropped: dict[str, str] = {}
        self._faults: set[str] = set()
        self._remarks: dict[str, str] = {}
        self.warnings: list[str] = []

    @property
    def left(self) -> list[HcaPort]:
        return [port for port in self._ports if port.name not in self._dropped]

    def drop(self, reason_of: Callable[[HcaPort], str | None], *, is_fault: bool = False) -> None:
        """Drop the ports that have a reason."""
        found = {port.name: reason for port in self.left if (reason := reason_of(port)) is not None}
        self._dropped |= found
        self._faults |= found.keys() if is_fault else set()

    def remark(self, names: Iterable[str], text: str) -> None:
        self._remarks |= dict.fromkeys(names, text)

    def decisions(self) -> tuple[HcaDecision, ...]:
        return tuple(
            HcaDecision(port, port.name not in self._dropped, self._reason(port), port.name in self._faults)
            for port in self._ports
        )

    def _reason(self, port: HcaPort) -> str:
        if port.name in self._dropped:
            return self._dropped[port.name]
        told = f"up, {port.link_layer}, {_rate_text(port.rate_gbps)}"
        return f"{told}; {self._remarks[port.name]}" if port.name in self._remarks else told


def _link_trouble(port: HcaPort) -> str | None:
    if port.state != "ACTIVE":
        return f"its link is not up: state {port.state or 'unknown'}, {port.phys_state or 'unknown'}"
    if port.phys_state != "LinkUp":
        return f"its physical link is not up: {port.phys_state or 'unknown'}"
    return None


def _drop_virtual_functions(sieve: _Sieve) -> None:
    virtual = [port for port in sieve.left if port.is_virtual_function]
    if len(virtual) == len(sieve.left):
        sieve.remark((port.name for port in virtual), "a virtual function, but the node has nothing else")
    else:
        sieve.drop(lambda port: "a virtual function" if port.is_virtual_function else None)


def _drop_bonds(sieve: _Sieve) -> None:
    """Bonds serve management, unless they have most of a network of Ethernet."""
    bonds = [port for port in sieve.left if port.is_bond]
    others = [port for port in sieve.left if not port.is_bond]
    if not any(port.link_layer == INFINIBAND for port in others) and _bandwidth(others) < _bandwidth(bonds):
        sieve.remark((port.name for port in bonds), "a bond, as most of the network of this node")
    else:
        sieve.drop(lambda port: "a bond of several ports" if port.is_bond else None)


def _bandwidth(ports: Iterable[HcaPort]) -> float:
    return sum(port.rate_gbps or 0.0 for port in ports)


def _drop_carriers(sieve: _Sieve, facts: NodeEnvironmentFacts, config: ClusterConfig) -> None:
    """Drop ports that other traffic needs, unless the ranks would lose by it, which is warned of.

    They would when none of that rate remained, or when more GPUs than before had to share one.
    """
    uses, expected = {port.name: _other_use(port, facts) for port in sieve.left}, config.expected.hcas or 0
    _, leading = _leading_layer(sieve.left)
    best = max((port.rate_gbps or 0.0 for port in leading), default=0.0)
    leading = [port for port in leading if (port.rate_gbps or 0.0) >= best - _RATE_TOLERANCE_GBPS]
    carrying = [port for port in leading if uses[port.name]]
    spare, gpus, why = len(leading) - len(carrying), max(1, len(facts.gpus)), ""
    is_expected = spare < expected <= len(leading)
    if is_expected:
        why = f"cluster.expected.hcas={expected} counts it"
    elif not spare:
        why = "the node has no other port as fast"
    elif -(-gpus // spare) > -(-gpus // len(leading)):
        why = f"without it {gpus} GPUs would share {spare} ports"
    for port in carrying if why else ():
        told = f"{uses[port.name]}, but {why}"
        sieve.remark([port.name], told)
        if not is_expected:
            sieve.warnings.append(f"{port.name} is used for the ranks: {told}")
    sieve.drop(lambda port: None if why and port in carrying else uses[port.name])


def _other_use(port: HcaPort, facts: NodeEnvironmentFacts) -> str | None:
    """Which other traffic its interface carries."""
    uses = [(one.interface, f"leads to the storage server {one.server} ({one.mount_point})") for one in facts.storage]
    for way, use in [(port.default_route, "carries the default route"), *uses]:
        if way and way in port.ways:
            return f"its interface {port.netdev}{'' if way == port.netdev else f' (as part of {way})'} {use}"
    return None


def _drop_other_layers(sieve: _Sieve) -> None:
    """Keep the link layer with most bandwidth: one fast Ethernet adapter must not outvote four InfiniBand ones."""
    best, ports = _leading_layer(sieve.left)
    most = f"most bandwidth of the node is {best} ({len(ports)} ports, {_bandwidth(ports):g} Gbit/s)"
    sieve.drop(lambda port: None if port in ports else f"its link layer is {port.link_layer}; {most}")


def _leading_layer(ports: Sequence[HcaPort]) -> tuple[str, list[HcaPort]]:
    """The link layer with most bandwidth, and its ports."""
    layers = {port.link_layer: [one for one in ports if one.link_layer == port.link_layer] for port in ports}
    best = max(layers, key=lambda one: (_bandwidth(layers[one]), len(layers[one]), one == INFINIBAND), default="")
    return best, layers.get(best, [])


def _drop_slow(sieve: _Sieve, config: ClusterConfig) -> None:
    best = max((port.rate_gbps or 0.0 for port in sieve.left), default=0.0)
    floor, source = best, "the fastest of this node have"
    expected = config.expected.hca_rate_gbps
    if expected is not None and sieve.left:
        if best >= expected - _RATE_TOLERANCE_GBPS:
            floor, source = expected, "cluster.expected.hca_rate_gbps is"
        else:
            sieve.warnings.append(
                f"no port reaches cluster.expected.hca_rate_gbps={expected:g}; the fastest have {_rate_text(best)}"
            )
    sieve.drop(
        lambda port: (
            f"{_rate_text(port.rate_gbps)}, slower than {source} {_rate_text(floor)}"
            if (port.rate_gbps or 0.0) < floor - _RATE_TOLERANCE_GBPS
            else None
        ),
        is_fault=True,
    )


def _rate_text(rate_gbps: float | None) -> str:
    return "a rate it does not tell" if rate_gbps is None else f"{rate_gbps:g} Gbit/s"


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
