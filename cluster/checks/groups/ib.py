"""Group `ib`: adapters for training, by what /sys and the kernel log say; no tool of InfiniBand is needed.

What cannot be read is UNKNOWN, and a check that looked at no port is never OK.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import AbsentError, CheckGroup
from cluster.env.gather import ADAPTER_QUESTIONS, adapter_facts
from cluster.env.hcas import choose_hcas
from cluster.survey.adapters import Adapters, HcaPort, roce_gid_index
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import LSPCI
from cluster.survey.section import UnreadableError
from engine.config.cluster import ExpectedHardware

Paths = Sequence[Sequence[str]]
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
# Ports beside GPUs stand for the network of the node when at most this part of the GPUs has none.
_MAX_GPUS_WITHOUT_PORT = 0.25
_PCIE_EFFICIENCY = 128 / 130  # of its encoding, from 8 GT/s on; what is slower than that feeds no port anyway
# A packet of RoCE must fit one of 256, 512, 1024, 2048 and 4096 bytes and its headers into the MTU.
_ROCE_MTU = 4200
_STATE_REMEDIES = {
    "Polling": "nobody answers at the other end: look at the cable, its transceivers and the switch port",
    "Disabled": "the port is switched off: enable it (ibportstate, mlxlink --port_state UP) or its cable is missing",
    "LinkUp": "the link is there and no subnet manager has set up the port: look at opensm or the switch",
    "LinkErrorRecovery": "the link recovers from errors over and over: look at the cable and its transceivers",
}


@dataclass(frozen=True)
class FabricView:
    """The ports for training, in the order of their names; reasons: why each other port is none of them.

    rate_gbps: what each must run at: as configured, else as most of those that are up do; None when none is up.
    lonely_gpus: PCI paths of GPUs that have no port beside them while most have.
    """

    facts: NodeFacts
    ports: tuple[HcaPort, ...]
    reasons: Mapping[str, str]
    rate_gbps: float | None
    lonely_gpus: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, facts: NodeFacts) -> FabricView:
        """The facts of a node. Raises UnreadableError."""
        if facts.pci is None:
            raise UnreadableError("PCI devices cannot be read from sysfs", facts.section(LSPCI).trouble())
        gpus = tuple(device.pci_path for device in facts.pci.gpus)
        ought, are_beside = _ports_for_training(facts.adapters, gpus, facts.config.expected)
        # What ranks use is judged, and nothing else that is in order; of the rest, what ought to be used.
        decisions = choose_hcas(adapter_facts(facts), facts.config)[0]
        used = {one.port.name: one.kept or (one.is_fault and one.port in ought) for one in decisions}
        ports = tuple(port for port in facts.adapters.ports if used[port.name])
        rate = usual(port.rate_gbps for port in ports if port.is_active and port.rate_gbps is not None)
        lonely = [path for path in gpus if path and not any(_share(path, port) for port in (*ports, *ought))]
        return cls(
            facts,
            ports,
            {one.port.name: one.reason for one in decisions if not used[one.port.name]},
            facts.config.expected.hca_rate_gbps or rate,
            tuple(lonely) if are_beside else (),
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
        return [check.ok(fine) if ports else check.expecting("").unknown("no port is up to look at", "see ib.count")]


def _ports_for_training(adapters: Adapters, gpu_paths: Paths, expected: ExpectedHardware) -> tuple[list[HcaPort], bool]:
    """(the ports that ought to be for training, up or not; whether they were told by their place beside GPUs).

    Where nothing else is there, as in a virtual machine or a network built of bonds, these are taken.
    """
    wanted = expected.hcas or 0
    left = [port for port in adapters.ports if not port.is_virtual_function] or list(adapters.ports)
    if sum(not port.has_default_route for port in left) >= wanted:
        left = [port for port in left if not port.has_default_route or port.link_layer == INFINIBAND]
    left = [port for port in left if not port.is_bond or any(_share(path, port) for path in gpu_paths)] or left
    layer = _link_layer(left, gpu_paths)
    left = [port for port in left if port.link_layer in (layer, "")]
    beside = _beside_gpus(left, adapters.driverless_paths, gpu_paths)
    if beside is not None and len(beside) >= wanted:
        return beside, True
    if 0 < wanted <= sum(port.is_active for port in left):
        left = [port for port in left if port.state != "DOWN"]  # as many as there should be are up
    return left, False


def usual(values: Iterable[float]) -> float | None:
    """The most frequent value, the highest of equally frequent ones; None of none."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value), default=None)


def _share(gpu_path: Sequence[str], port: HcaPort) -> bool:
    """Whether both are below one root port, and so below one PCI switch."""
    return bool(gpu_path and port.pci_path) and gpu_path[0] == port.pci_path[0]


def _beside_gpus(ports: Sequence[HcaPort], driverless: Paths, gpu_paths: Paths) -> list[HcaPort] | None:
    """The ports that share a PCI switch with a GPU; None where that does not tell the network of the node."""
    gpus = [path for path in gpu_paths if len(path) > 1]
    # An adapter without a driver is still beside its GPU: it must not make the others look like chance.
    places = [port.pci_path[:1] for port in ports] + [path[:1] for path in driverless]
    lonely = sum(path[:1] not in places for path in gpus)
    if not gpus or lonely > _MAX_GPUS_WITHOUT_PORT * len(gpus):
        return None
    return [port for port in ports if any(_share(path, port) for path in gpus)]


def _link_layer(ports: Sequence[HcaPort], gpu_paths: Paths) -> str:
    """The link layer of training: that of most ports beside GPUs, else InfiniBand where any port has it."""
    beside = [port for port in ports if any(_share(path, port) for path in gpu_paths)]
    counts = Counter(port.link_layer for port in beside if port.is_active)
    counts = counts or Counter(port.link_layer for port in beside)
    if counts[INFINIBAND] != counts[ETHERNET]:
        return INFINIBAND if counts[INFINIBAND] > counts[ETHERNET] else ETHERNET
    return INFINIBAND if any(port.link_layer == INFINIBAND for port in ports) else ETHERNET


def check_count(check: Check, view: FabricView) -> list[Finding]:
    """As many InfiniBand or RoCE ports as configured, else as on most nodes; each with a driver."""
    up, total, wanted = len(view.active), len(view.ports), view.facts.config.expected.hcas
    left_out = "; ".join(f"{name}: {reason}" for name, reason in list(view.reasons.items())[:8])
    observed = f"{up} of {total} ports for training are up" if up < total else f"{up} ports for training are up"
    check = check.expecting(f"{wanted} (cluster.expected.hcas)" if wanted else "")
    findings = list(_lost_adapters(check, view, left_out))
    if wanted and up < wanted:
        findings.append(check.fail(observed, "see the ports that are down, and why others are left out", left_out))
    if findings:
        return findings
    if not up:
        return [check.fail(observed, "see ib.state", left_out)]
    if up < total and not wanted:
        return [check.skip(f"{observed}; ib.state says which are not")]
    return [check.ok(observed, left_out)]


def _lost_adapters(check: Check, view: FabricView, left_out: str) -> Iterator[Finding]:
    adapters = view.facts.adapters
    for path in adapters.driverless_paths:
        address = path[-1] if path else "an unknown address"
        text = f"the InfiniBand adapter at {address} has no driver"
        yield check.on(address).fail(text, "modprobe mlx5_ib, or look for its error in dmesg")
    for device in adapters.portless:
        yield check.on(device).fail("the adapter shows no port", "look for its error in dmesg; reset or swap it")
    # That a GPU's adapter has no driver is told above.
    told = {path[:1] for path in adapters.driverless_paths}
    for path in view.lonely_gpus:
        if path[:1] not in told:
            text = "no adapter is beside this GPU, while the others have one"
            remedy = "look for a lost adapter (lspci, dmesg); if the node is built so, set cluster.expected.hcas"
            yield check.on(f"GPU at {path[-1]}").fail(text, remedy, left_out)


def check_state(check: Check, view: FabricView) -> list[Finding]:
    """Every port for training is up: ACTIVE and LinkUp. One good port says nothing about the others."""

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if port.is_active:
            return None
        observed = f"{port.state or 'state not readable'}, {port.phys_state or 'physical state not readable'}"
        if not port.state or not port.phys_state:
            return check.unknown(observed, "look at /sys/class/infiniband on the node")
        remedy = _STATE_REMEDIES.get(port.phys_state, "look at the cable, the switch port and dmesg")
        return check.fail(
            observed, f"{remedy}; if it is not in use, say how many are: cluster.expected.hcas", _shown(port)
        )

    return view.each(check.expecting("ACTIVE, LinkUp"), judge, f"all {len(view.ports)} are up", view.ports)


def check_rate(check: Check, view: FabricView) -> list[Finding]:
    """Every port that is up runs at the configured rate, else at that of the others."""
    rate = view.rate_gbps or 0.0

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if port.rate_gbps is None:
            return check.unknown("its rate is not readable", "look at ibstat on the node")
        if port.rate_gbps >= rate:
            return None
        remedy = "look at the cable (mlxlink -c), its transceivers and the speed of the switch port"
        return check.fail(f"{port.rate_gbps:g} Gb/s", remedy, _shown(port))

    return view.each(check.expecting(f"{rate:g} Gb/s"), judge, f"{rate:g} Gb/s on all", view.active)


def check_mtu(check: Check, view: FabricView) -> list[Finding]:
    """The interfaces of the ports have one MTU, which does not cut the packets of RoCE."""
    ports = [port for port in view.active if port.netdev is not None and port.netdev_is_up is not False]
    if view.active and not ports:
        return [check.skip("no port carries IP")]
    most = usual(port.netdev_mtu for port in ports if port.netdev_mtu is not None) or 0

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if port.netdev_mtu is None:
            return check.unknown(f"{port.netdev}: MTU not readable", f"look at ip link show {port.netdev}")
        if port.netdev_mtu == most:
            return None
        severity = Verdict.FAIL if port.link_layer == ETHERNET else Verdict.WARN
        return check.finding(severity, f"{port.netdev}: {port.netdev_mtu}", f"ip link set {port.netdev} mtu {most:g}")

    check = check.expecting(f"{most:g}" if most else "")
    found = view.each(check, judge, f"{most:g} on all", ports)
    if found[0].severity is Verdict.OK and most < _ROCE_MTU and any(port.link_layer == ETHERNET for port in ports):
        text = f"{most:g} on all: packets of RoCE are cut to 1024 bytes or less"
        return [
            check.expecting(f"at least {_ROCE_MTU}").warn(text, "an MTU of 9000 on interfaces and switches is usual")
        ]
    return found


def check_pcie(check: Check, view: FabricView) -> list[Finding]:
    """Every adapter has all its PCIe lanes, and PCIe is as fast as its port."""
    devices = {port.device: port for port in view.ports}
    if devices and all(port.pcie_width is None and port.pcie_width_max is None for port in devices.values()):
        return [check.skip("this machine tells no width of PCIe links, as virtual machines do")]

    def judge(check: Check, port: HcaPort) -> Finding | None:
        check, width, most = check.on(port.device), port.pcie_width, port.pcie_width_max
        look = f"lspci -vv -s {port.pci_address}"
        if width is None or most is None or width > most:
            return check.unknown("its PCIe width makes no sense or is not readable", look)
        check = check.expecting(f"x{most}")
        if width < most:
            text = f"x{width}{f' at {port.pcie_gts:g} GT/s' if port.pcie_gts else ''}"
            return check.fail(text, f"seat the adapter or its riser anew ({port.pci_address}); look at the BIOS")
        if not port.is_active:
            return None
        if port.pcie_gts is None:
            return check.unknown("the speed of its PCIe lanes is not readable", look)
        carried = port.pcie_gts * width * _PCIE_EFFICIENCY
        if port.rate_gbps is None or carried >= port.rate_gbps:
            return None
        text = f"x{width} at {port.pcie_gts:g} GT/s carries {carried:.0f} Gb/s"
        return check.expecting(f"{port.rate_gbps:g} Gb/s, as its port").fail(
            text, f"look at the speed of the slot in the BIOS ({port.pci_address})"
        )

    return view.each(check, judge, "all lanes are there", devices.values())


def check_gid(check: Check, view: FabricView) -> list[Finding]:
    """Every RoCE port has a GID of RoCE v2 over IPv4, at one index on all ports."""
    ports = [port for port in view.active if port.link_layer == ETHERNET]
    if not any(port.link_layer == ETHERNET for port in view.ports):
        return [check.skip("InfiniBand needs none")]
    indices: dict[int, list[str]] = defaultdict(list)

    def judge(check: Check, port: HcaPort) -> Finding | None:
        index = roce_gid_index(port)
        if index is not None:
            indices[index].append(port.name)
            return None
        remedy = f"give {port.netdev or 'its interface'} an IPv4 address; RoCE v2 must be on (cma_roce_mode, show_gids)"
        return check.fail("no GID of RoCE v2 over IPv4", remedy)

    findings = view.each(check, judge, "", ports)
    shown = "; ".join(f"index {index}: {', '.join(names)}" for index, names in sorted(indices.items()))
    if len(indices) > 1:  # NCCL_IB_GID_INDEX is one number
        remedy = "give the interfaces their addresses in the same order; NCCL from 2.21 on finds the index itself"
        findings.append(check.warn(shown, remedy))
    elif indices and findings[0].severity is Verdict.OK:
        findings = [check.ok(f"index {min(indices)}")]
    return findings


def _shown(port: HcaPort) -> str:
    told = f"state {port.state}, phys_state {port.phys_state}, rate {port.rate_gbps} Gb/s, {port.link_layer}"
    return f"{told}, {port.pci_address}"


def look_at_adapters(facts: NodeFacts) -> FabricView:
    """The ports for training. Raises UnreadableError, and AbsentError where there are none and none are expected."""
    view = FabricView.of(facts)
    if view.ports or facts.config.expected.hcas or facts.adapters.portless or facts.adapters.driverless_paths:
        return view
    why = "; ".join(f"{name} {reason}" for name, reason in list(view.reasons.items())[:4])
    raise AbsentError(f"no adapter for training{f': {why}' if why else ''}")


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have alike, where the configuration does not say the right number of ports."""
    try:
        view = look_at_adapters(facts)
    except AbsentError:
        return {"ib.count": "0"}
    values: dict[str, list[object]] = {
        "ib.link_layer": [port.link_layer or None for port in view.active],
        "ib.mtu": [port.netdev_mtu for port in view.active],
        "ib.rate": [f"{view.rate_gbps:g}" if view.rate_gbps is not None else None],
        "ib.count": [len(view.active) if facts.config.expected.hcas is None else None],
    }
    # A port that does not tell leaves the trait out: what the others have is not what the node has.
    told = {check: found for check, found in values.items() if found and None not in found}
    return {check: ", ".join(sorted({str(value) for value in found})) for check, found in told.items()}


GROUP = CheckGroup(
    "ib",
    (check_count, check_state, check_rate, check_mtu, check_pcie, check_gid),
    look=look_at_adapters,
    questions=ADAPTER_QUESTIONS,
    traits=_traits,
    compared={"ib.link_layer": "The ports for training speak the same on all nodes, InfiniBand or Ethernet."},
)
