"""Which ports of a node training uses, and why the others are left out: what is checked hangs on that.

A port that is down is not left out for being down: then eight good ports and seven would look the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.checks.check import Check
from cluster.checks.finding import Finding
from cluster.survey.adapters import Adapters, HcaPort, parse_adapters
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig, ExpectedHardware

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
# Ports beside GPUs stand for the network of the node when at most this part of the GPUs has none.
_MAX_GPUS_WITHOUT_PORT = 0.25


@dataclass(frozen=True)
class FabricView:
    """The ports for training, in the order of their names; reasons: why each other port is none of them.

    rate_gbps: what each must run at: as configured, else as most of those that are up do; None when none is up.
    beside_gpus: whether they were told by their place on the PCI bus. lonely_gpus: PCI paths of GPUs that have none
    beside them while most have.
    """

    probe: NodeProbe
    config: ClusterConfig
    adapters: Adapters
    ports: tuple[HcaPort, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    rate_gbps: float | None = None
    beside_gpus: bool = False
    lonely_gpus: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, probe: NodeProbe, config: ClusterConfig) -> FabricView:
        """The answer of a node, read. Raises UnreadableError."""
        adapters = parse_adapters(probe.section("ib.ports"))
        ports, reasons, beside = _choose(adapters, config.expected)
        lonely = [path for path in adapters.gpu_paths if path and not any(_share(path, port) for port in ports)]
        rate = usual(port.rate_gbps for port in ports if port.is_active and port.rate_gbps is not None)
        return cls(
            probe,
            config,
            adapters,
            tuple(ports),
            reasons,
            config.expected.hca_rate_gbps or rate,
            beside,
            tuple(lonely) if beside else (),
        )

    @property
    def active(self) -> tuple[HcaPort, ...]:
        """Those that traffic can pass."""
        return tuple(port for port in self.ports if port.is_active)

    def each(
        self,
        check: Check,
        judge: Callable[[Check, HcaPort], Finding | None],
        fine: str,
        ports: Iterable[HcaPort],
    ) -> list[Finding]:
        """A finding for every port that `judge` says something of; one OK with `fine` when it says nothing at all.

        UNKNOWN when there is no port to look at: all of none is no good news.
        """
        ports = list(ports)
        told = [judge(check.on(port.name), port) for port in ports]
        found = [finding for finding in told if finding is not None]
        if found:
            return found
        return [check.ok(fine)] if ports else [check.unknown("no port is up to look at", "see ib.state")]


def _choose(adapters: Adapters, expected: ExpectedHardware) -> tuple[list[HcaPort], dict[str, str], bool]:
    """(the ports for training among all of the node, why the others are none, whether their place told)."""
    reasons: dict[str, str] = {}
    left = list(adapters.ports)

    def leave_out(is_odd: Callable[[HcaPort], bool], reason: Callable[[HcaPort], str], *, spare_all: bool) -> None:
        odd = [port for port in left if is_odd(port)]
        if spare_all and len(odd) == len(left):
            return  # nothing else is there: a virtual machine, or a network built of bonds
        reasons.update({port.name: reason(port) for port in odd})
        left[:] = [port for port in left if port.name not in reasons]

    leave_out(lambda port: port.is_virtual_function, lambda port: "a virtual function", spare_all=True)
    wanted = expected.hcas or 0
    if sum(not port.has_default_route for port in left) >= wanted:
        leave_out(
            lambda port: port.has_default_route and port.link_layer != INFINIBAND,
            lambda port: f"{port.netdev} carries the default route",
            spare_all=False,
        )
    leave_out(
        lambda port: port.is_bond and not any(_share(path, port) for path in adapters.gpu_paths),
        lambda port: "a bond, as management networks have",
        spare_all=True,
    )
    layer = _link_layer(left, adapters.gpu_paths)
    leave_out(
        lambda port: port.link_layer not in (layer, ""),
        lambda port: f"speaks {port.link_layer}, the ports for training {layer}",
        spare_all=False,
    )
    beside = _beside_gpus(left, adapters)
    if beside is None or len(beside) < wanted:
        if wanted and sum(port.is_active for port in left) >= wanted:
            others = f"down, while {wanted} others are up as cluster.expected.hcas says"
            leave_out(lambda port: port.state == "DOWN", lambda port: others, spare_all=False)
        return left, reasons, False
    leave_out(lambda port: port.name not in beside, lambda port: "not beside a GPU", spare_all=False)
    return left, reasons, True


def usual(values: Iterable[float]) -> float | None:
    """The most frequent value, the highest of equally frequent ones; None of none."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value), default=None)


def _share(gpu_path: Sequence[str], port: HcaPort) -> bool:
    """Whether both are below one root port, and so below one PCI switch."""
    return bool(gpu_path and port.pci_path) and gpu_path[0] == port.pci_path[0]


def _beside_gpus(ports: Sequence[HcaPort], adapters: Adapters) -> set[str] | None:
    """Names of ports that share a PCI switch with a GPU; None where that does not tell the network of the node."""
    gpus = [path for path in adapters.gpu_paths if len(path) > 1]
    # An adapter without a driver is still beside its GPU: it must not make the others look like chance.
    places = [port.pci_path[:1] for port in ports] + [path[:1] for path in adapters.driverless_paths]
    lonely = sum(path[:1] not in places for path in gpus)
    if not gpus or lonely > _MAX_GPUS_WITHOUT_PORT * len(gpus):
        return None
    return {port.name for port in ports if any(_share(path, port) for path in gpus)}


def _link_layer(ports: Sequence[HcaPort], gpu_paths: Sequence[Sequence[str]]) -> str:
    """The link layer of training: that of most ports beside GPUs, else InfiniBand where any port has it."""
    beside = [port for port in ports if any(_share(path, port) for path in gpu_paths)]
    counts = Counter(port.link_layer for port in beside if port.is_active)
    counts = counts or Counter(port.link_layer for port in beside)
    if counts[INFINIBAND] != counts[ETHERNET]:
        return INFINIBAND if counts[INFINIBAND] > counts[ETHERNET] else ETHERNET
    return INFINIBAND if any(port.link_layer == INFINIBAND for port in ports) else ETHERNET
