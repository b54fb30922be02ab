"""Which ports of a node NCCL shall use, and which of them serves which GPU.

Every port gets a decision and its reason; nothing is dropped silently.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.survey.drivers import LSPCI, GpuAddress
from cluster.survey.facts import NodeFacts
from cluster.survey.network import CARRIERS
from cluster.survey.rdma import PORTS, HcaPort, natural
from engine.config.cluster import ClusterConfig

ADAPTER_QUESTIONS = (PORTS, LSPCI, CARRIERS)
INFINIBAND = "InfiniBand"
# A link reports 100, 200, 400 or 800; what is within this of another rate is the same rate.
_RATE_TOLERANCE_GBPS = 0.5


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


# Of the ports that are left: which is dropped, or stays (True) all the same, and why. A warning has no port.
_Verdicts = Iterator[tuple[HcaPort | None, bool, str]]
_Rule = Callable[[Sequence[HcaPort], NodeFacts, ClusterConfig], _Verdicts]


def choose_hcas(facts: NodeFacts, config: ClusterConfig) -> tuple[tuple[HcaDecision, ...], tuple[str, ...]]:
    """(a decision for every port, in the order of their numbers; warnings).

    A port stays when it is no iWARP, its link is up, it is neither a virtual function nor a bond, nor on the way to the
    default route or a storage server while ranks can do without it, has the link layer with most bandwidth and the rate
    of the fastest (or at least cluster.expected.hca_rate_gbps), and has a GPU beside it where every GPU has a port
    beside it. Virtual functions stay where a node has nothing else, as in a virtual machine, and bonds where they are
    most of the network. From `ADAPTER_QUESTIONS`. Raises UnreadableError.
    """
    ports = sorted(facts.adapters.ports, key=lambda port: natural(port.name))
    dropped: dict[str, HcaDecision] = {}
    remarks: dict[str, str] = {}
    warnings: list[str] = []
    for rule in _RULES:
        left = [port for port in ports if port.name not in dropped]
        for port, stays, text in rule(left, facts, config):
            if port is None:
                warnings.append(text)
            elif stays:
                remarks[port.name] = f"; {text}"
            else:
                dropped[port.name] = HcaDecision(port, False, text, rule in _FAULTS)

    def kept(port: HcaPort) -> HcaDecision:
        told = f"up, {port.link_layer}, {_rate_text(port.rate_gbps)}"
        return HcaDecision(port, True, told + remarks.get(port.name, ""))

    return tuple(dropped.get(port.name) or kept(port) for port in ports), tuple(warnings)


def _drop_iwarp(left: Sequence[HcaPort], *_: object) -> _Verdicts:
    """Drop iWARP, which NCCL would list as RoCE, for it looks at the link layer alone (src/transport/net_ib).

    NCCL connects queue pairs by itself, with LIDs or GIDs; those of iWARP are connected by the kernel's connection
    manager only, over TCP (rdma_cm), so that a run would end when its ranks connect.
    """
    for port in left:
        if port.is_iwarp:
            yield port, False, "iWARP (RDMA over TCP, node type RNIC), which NCCL cannot use: it is no RoCE"


def _drop_down(left: Sequence[HcaPort], *_: object) -> _Verdicts:
    for port in left:
        if port.state != "ACTIVE":
            yield port, False, f"its link is not up: state {port.state or 'unknown'}, {port.phys_state or 'unknown'}"
        elif port.phys_state != "LinkUp":
            yield port, False, f"its physical link is not up: {port.phys_state or 'unknown'}"


def _drop_virtual_functions(left: Sequence[HcaPort], *_: object) -> _Verdicts:
    stays = all(port.is_virtual_function for port in left)
    text = "a virtual function, but the node has nothing else" if stays else "a virtual function"
    yield from ((port, stays, text) for port in left if port.is_virtual_function)


def _drop_bonds(left: Sequence[HcaPort], *_: object) -> _Verdicts:
    """Bonds serve management, unless they have most of a network of Ethernet."""
    bonds, others = ([port for port in left if port.is_bond is wanted] for wanted in (True, False))
    stays = not any(port.link_layer == INFINIBAND for port in others) and _bandwidth(others) < _bandwidth(bonds)
    text = "a bond, as most of the network of this node" if stays else "a bond of several ports"
    yield from ((port, stays, text) for port in bonds)


def _drop_carriers(left: Sequence[HcaPort], facts: NodeFacts, config: ClusterConfig) -> _Verdicts:
    """Drop ports that other traffic needs, unless the ranks would lose by it, which is warned of.

    They would when none of that rate remained, or when more GPUs than before had to share one.
    """
    uses, expected = {port.name: _other_use(port, facts) for port in left}, config.expected.hcas or 0
    _, leading = _leading_layer(left)
    best = _best_rate(leading)
    leading = [port for port in leading if (port.rate_gbps or 0.0) >= best - _RATE_TOLERANCE_GBPS]
    spare, gpus, why = sum(not uses[port.name] for port in leading), max(1, len(facts.gpu_addresses)), ""
    is_expected = spare < expected <= len(leading)
    if is_expected:
        why = f"cluster.expected.hcas={expected} counts it"
    elif not spare:
        why = "the node has no other port as fast"
    elif -(-gpus // spare) > -(-gpus // len(leading)):
        why = f"without it {gpus} GPUs would share {spare} ports"
    for port in (one for one in left if uses[one.name]):
        if not why or port not in leading:
            yield port, False, uses[port.name]
            continue
        yield port, True, (told := f"{uses[port.name]}, but {why}")
        if not is_expected:
            yield None, True, f"{port.name} is used for the ranks: {told}"


def _other_use(port: HcaPort, facts: NodeFacts) -> str:
    """Which other traffic its interface carries; empty for none."""
    uses = [
        (one.interface, f"leads to the storage server {one.server} ({one.mount_point})")
        for one in facts.carriers.storage
    ]
    for way, use in [(port.default_route, "carries the default route"), *uses]:
        if way and way in port.ways:
            return f"its interface {port.netdev}{'' if way == port.netdev else f' (as part of {way})'} {use}"
    return ""


def _drop_other_layers(left: Sequence[HcaPort], *_: object) -> _Verdicts:
    """Keep the link layer with most bandwidth: one fast Ethernet adapter must not outvote four InfiniBand ones."""
    best, ports = _leading_layer(left)
    most = f"most bandwidth of the node is {best} ({len(ports)} ports, {_bandwidth(ports):g} Gbit/s)"
    yield from ((port, False, f"its link layer is {port.link_layer}; {most}") for port in left if port not in ports)


def _leading_layer(ports: Sequence[HcaPort]) -> tuple[str, list[HcaPort]]:
    """The link layer with most bandwidth, and its ports."""
    layers = {port.link_layer: [one for one in ports if one.link_layer == port.link_layer] for port in ports}
    best = max(layers, key=lambda one: (_bandwidth(layers[one]), len(layers[one]), one == INFINIBAND), default="")
    return best, layers.get(best, [])


def _drop_slow(left: Sequence[HcaPort], facts: NodeFacts, config: ClusterConfig) -> _Verdicts:
    floor, source, expected = _best_rate(left), "the fastest of this node have", config.expected.hca_rate_gbps
    if expected is not None and floor >= expected - _RATE_TOLERANCE_GBPS:
        floor, source = expected, "cluster.expected.hca_rate_gbps is"
    elif expected is not None and left:
        fastest = f"the fastest have {_rate_text(floor)}"
        yield None, True, f"no port reaches cluster.expected.hca_rate_gbps={expected:g}; {fastest}"
    for port in left:
        if (port.rate_gbps or 0.0) < floor - _RATE_TOLERANCE_GBPS:
            yield port, False, f"{_rate_text(port.rate_gbps)}, slower than {source} {_rate_text(floor)}"


def _drop_without_gpu(left: Sequence[HcaPort], facts: NodeFacts, config: ClusterConfig) -> _Verdicts:
    """Drop ports that serve no GPU where every GPU has a port below its own PCI switch.

    What is left over is for storage (GPFS, Weka and DAOS mount nothing that names a server), or for management of
    NVSwitches, as the bridges of HGX B200 are; NCCL would send through them, across CPU sockets.
    """
    gpus, expected = [gpu.pci_path for gpu in facts.gpu_addresses], config.expected.hcas or 0
    beside = [port for port in left if is_beside(port, gpus)]
    paired = bool(gpus) and all(any(is_beside(port, [gpu]) for port in beside) for gpu in gpus)
    if not paired or len(beside) < expected <= len(left):
        return
    every = f"each of the {len(gpus)} GPUs has" if len(gpus) > 1 else "the GPU has"
    text = f"serves no GPU: it is below no PCI switch with one, and {every} a port below its own"
    yield from ((port, False, text) for port in left if port not in beside)


def is_beside(port: HcaPort, gpu_paths: Iterable[Sequence[str]]) -> bool:
    """Whether it is below one root port with a GPU, and so below one PCI switch."""
    return any(path and port.pci_path and path[0] == port.pci_path[0] for path in gpu_paths)


_RULES: tuple[_Rule, ...] = (
    *(_drop_iwarp, _drop_down, _drop_virtual_functions, _drop_bonds),
    *(_drop_carriers, _drop_other_layers, _drop_slow, _drop_without_gpu),
)
_FAULTS: tuple[_Rule, ...] = (_drop_down, _drop_slow)


def _bandwidth(ports: Iterable[HcaPort]) -> float:
    return sum(port.rate_gbps or 0.0 for port in ports)


def _best_rate(ports: Iterable[HcaPort]) -> float:
    return max((port.rate_gbps or 0.0 for port in ports), default=0.0)


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
    return tuple(sorted(ports, key=lambda port: (first.get(port.name, math.inf), natural(port.name))))


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
