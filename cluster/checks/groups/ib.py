"""Group `ib`: adapters for training, by what /sys and the kernel log say; no tool of InfiniBand is needed.

What cannot be read is UNKNOWN, and a check that looked at no port is never OK.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.checks.check import Check, CheckGroup, Finding, age, each
from cluster.env.hcas import ADAPTER_QUESTIONS, choose_hcas, is_beside
from cluster.survey.drivers import KERNEL_LOG, LSPCI, RECENT_S, read_kernel_log
from cluster.survey.facts import NodeFacts
from cluster.survey.rdma import GPUDIRECT, HcaPort, has_roce_gid
from cluster.survey.section import NotApplicableError, UnreadableError

ETHERNET = "Ethernet"
_PCIE_EFFICIENCY = 128 / 130  # of its encoding, from 8 GT/s on; what is slower than that feeds no port anyway
# A packet of RoCE is of 256, 512, 1024, 2048 or 4096 bytes, and has to fit into the MTU with its headers.
_ROCE_MTU = 4200
_STATE_REMEDIES = {
    "Polling": "nobody answers at the other end: look at the cable, its transceivers and the switch port",
    "Disabled": "the port is switched off: enable it (ibportstate, mlxlink --port_state UP) or its cable is missing",
    "LinkUp": "the link is there and no subnet manager has set up the port: look at opensm or the switch",
}
_LINK_REMEDY = "clean or swap the cable and its transceivers; look at the switch port"
_STAMP = re.compile(r"\[ *(\d{1,12}\.\d{1,9})\]")
_KERNEL_DEVICE = re.compile(r"\bmlx[45]_core ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")
_LINK_DOWN = re.compile(r"\bLink down\b|Cable (unplugged|error)", re.IGNORECASE)
_FLAPS = 3


@dataclass(frozen=True)
class FabricView:
    """The ports for training, in the order of their names; reasons: why each other port is none of them.

    rate_gbps: what each must run at: as configured, else as most of those that are up do; None when none is up.
    """

    facts: NodeFacts
    ports: tuple[HcaPort, ...]
    reasons: Mapping[str, str]
    rate_gbps: float | None

    @classmethod
    def of(cls, facts: NodeFacts) -> FabricView:
        """The facts of a node: what ranks use, and what they would if it were in order. Raises UnreadableError."""
        if facts.pci is None:
            raise UnreadableError("PCI devices cannot be read from sysfs", facts.section(LSPCI).trouble())
        gpus = [device.pci_path for device in facts.pci.gpus]
        decisions = choose_hcas(facts, facts.config)[0]
        kept = [one.port for one in decisions if one.kept]
        missed = [one.port for one in decisions if one.is_fault and not _is_other(one.port)]
        if any(is_beside(port, gpus) for port in (*kept, *missed)):
            # Adapters sit beside GPUs here: elsewhere a port without cable is a spare one.
            missed = [port for port in missed if is_beside(port, gpus)]
        else:
            missed = [port for port in missed if not kept or port.link_layer in ("", kept[0].link_layer)]
        if len(kept) >= (facts.config.expected.hcas or math.inf):
            missed = []
        ports = tuple(one.port for one in decisions if one.port in (*kept, *missed))
        rates = Counter(port.rate_gbps for port in ports if port.is_active and port.rate_gbps is not None)
        usual = max(rates, key=lambda rate: (rates[rate], rate), default=None)
        reasons = {one.port.name: one.reason for one in decisions if one.port not in ports}
        return cls(facts, ports, reasons, facts.config.expected.hca_rate_gbps or usual)

    @property
    def active(self) -> tuple[HcaPort, ...]:
        """Those that traffic can pass."""
        return tuple(port for port in self.ports if port.is_active)


def _is_other(port: HcaPort) -> bool:
    """Whether it is of a kind that ranks use only where there is nothing else."""
    return port.is_bond or port.is_virtual_function or bool(port.default_route)


def check_count(check: Check, view: FabricView) -> list[Finding]:
    """As many InfiniBand or RoCE ports as configured, else as on most nodes; each adapter with a driver."""
    up, total, wanted = len(view.active), len(view.ports), view.facts.config.expected.hcas
    left_out = "; ".join(f"{name}: {reason}" for name, reason in list(view.reasons.items())[:8])
    observed = f"{up} of {total} ports for training are up" if up < total else f"{up} ports for training are up"
    remedy = "modprobe mlx5_ib; look for its error in dmesg; reset or swap it"
    found = [check.on(name).fail(text, remedy) for name, text in view.facts.adapters.broken.items()]
    check = check.expecting(f"{wanted} (cluster.expected.hcas)" if wanted else "")
    if up < (wanted or 1):
        found.append(check.fail(observed, "see ib.state, and why others are left out", left_out))
    if found:
        return found
    return [check.ok(observed, left_out) if up == total or wanted else check.skip(f"{observed}; see ib.state")]


def check_state(check: Check, view: FabricView) -> list[Finding]:
    """Every port for training is up: ACTIVE and LinkUp. One good port says nothing about the others."""

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if port.is_active:
            return None
        observed = f"{port.state or 'state not readable'}, {port.phys_state or 'physical state not readable'}"
        if not port.state or not port.phys_state:
            return check.unknown(observed, "look at /sys/class/infiniband on the node")
        remedy = _STATE_REMEDIES.get(port.phys_state, _LINK_REMEDY)
        return check.fail(
            observed, f"{remedy}; if it is not in use, say how many are: cluster.expected.hcas", _shown(port)
        )

    ports = {port.name: port for port in view.ports}
    return each(check.expecting("ACTIVE, LinkUp"), ports, judge, f"all {len(ports)} are up")


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

    return each(check.expecting(f"{rate:g} Gb/s"), _by_name(view.active), judge, f"{rate:g} Gb/s on all")


def check_pcie(check: Check, view: FabricView) -> list[Finding]:
    """Every adapter has all its PCIe lanes, and PCIe is as fast as its port."""
    if view.ports and all(port.pcie_width is None and port.pcie_width_max is None for port in view.ports):
        return [check.skip("this machine tells no width of PCIe links, as virtual machines do")]
    return each(check, {port.device: port for port in view.ports}, _judge_pcie, "all lanes are there")


def _judge_pcie(check: Check, port: HcaPort) -> Finding | None:
    width, most, look = port.pcie_width, port.pcie_width_max, f"lspci -vv -s {port.pci_address}"
    if width is None or most is None or width > most:
        return check.unknown("its PCIe width makes no sense or is not readable", look)
    check, remedy = (
        check.expecting(f"x{most}"),
        f"seat the adapter or its riser anew ({port.pci_address}); see the BIOS",
    )
    if width < most:
        return check.fail(f"x{width}{f' at {port.pcie_gts:g} GT/s' if port.pcie_gts else ''}", remedy)
    if not port.is_active:
        return None
    if port.pcie_gts is None:
        return check.unknown("the speed of its PCIe lanes is not readable", look)
    carried = port.pcie_gts * width * _PCIE_EFFICIENCY
    if port.rate_gbps is None or carried >= port.rate_gbps:
        return None
    text = f"x{width} at {port.pcie_gts:g} GT/s carries {carried:.0f} Gb/s"
    return check.expecting(f"{port.rate_gbps:g} Gb/s, as its port").fail(text, remedy)


def check_gid(check: Check, view: FabricView) -> list[Finding]:
    """Every RoCE port has a GID of RoCE v2 over IPv4."""
    if not any(port.link_layer == ETHERNET for port in view.ports):
        return [check.skip("InfiniBand needs none")]

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if has_roce_gid(port):
            return None
        remedy = f"give {port.netdev or 'its interface'} an IPv4 address; RoCE v2 must be on (cma_roce_mode, show_gids)"
        return check.fail("no GID of RoCE v2 over IPv4", remedy)

    return each(check, _by_name(view.active), judge, "every port has one")


def check_mtu(check: Check, view: FabricView) -> list[Finding]:
    """The interfaces of RoCE ports have one MTU, which does not cut their packets."""
    mtus = Counter(port.mtu for port in view.active if port.link_layer == ETHERNET and port.mtu is not None)
    usual = max(mtus, key=lambda mtu: (mtus[mtu], mtu), default=0)
    if not any(port.link_layer == ETHERNET for port in view.ports):
        return [check.skip("InfiniBand has one of its own")]

    def judge(check: Check, port: HcaPort) -> Finding | None:
        if port.mtu is None:
            return check.unknown("not readable", f"look at `ip link show {port.netdev or ''}`")
        if port.mtu != usual:
            return check.expecting(f"{usual}").fail(f"{port.mtu}", f"`ip link set {port.netdev} mtu {usual}`")
        if usual >= _ROCE_MTU:
            return None
        text = f"{usual}: packets of RoCE are cut to 1024 bytes or less"
        return check.expecting(f"at least {_ROCE_MTU}").warn(text, "9000 on interfaces and switches is usual")

    return each(check, {port.name: port for port in view.active if port.link_layer == ETHERNET}, judge, f"{usual}")


def check_counters(check: Check, view: FabricView) -> list[Finding]:
    """Errors that are being counted now, over two looks; what a counter stands at may be years old."""

    def judge(check: Check, port: HcaPort) -> Finding | None:
        # The kernel makes this folder for drivers that answer management datagrams, and only in the network namespace
        # of the device. Source: Linux, drivers/infiniband/core/sysfs.c (`ops.process_mad && is_full_dev`) and the
        # ib_device_ops of drivers: mlx4, mlx5, hfi1, qib, bnxt_re since 6.15, rxe of late. Not efa, irdma, siw, erdma,
        # mana and hns, which only have hw_counters. A driver that answers no datagram about errors (qedr, rxe) reads
        # like a failed adapter, EINVAL: unknown.
        if not port.has_counters:
            return check.skip("its driver has no error counters")
        if "link_downed" not in port.errors:
            if port.is_virtual_function:
                return check.skip("a virtual function tells no error counters")
            return check.unknown("its error counters are not readable", "look at ports/1/counters below /sys")
        bad = ", ".join(f"{name} +{by}" for name, by in sorted(port.errors.items()) if by > 0)
        return check.fail(f"errors are being counted: {bad}", _LINK_REMEDY) if bad else None

    return each(check, _by_name(view.ports), judge, "no errors were counted in a second")


def check_log(check: Check, view: FabricView) -> list[Finding]:
    """What the kernel logged of adapters since boot: links that were lost, firmware that failed."""
    log = read_kernel_log(view.facts.section(KERNEL_LOG))
    devices = {port.pci_address: port for port in view.ports if port.pci_address}
    if not devices:
        raise UnreadableError("no adapter has a known place on the PCI bus")
    found = []
    for count, line in log.seen:
        device, stamp = _KERNEL_DEVICE.search(line), _STAMP.match(line)
        if device is None or device[1] not in devices:
            continue
        one, age_s = (
            check.on(devices[device[1]].device),
            max(0.0, log.uptime - float(stamp[1] if stamp else math.inf)),
        )
        period = "within a day" if age_s < RECENT_S else "since boot"
        times = f"{count} time{'s' if count > 1 else ''} {period}, the last {age(age_s)} ago"
        if not _LINK_DOWN.search(line):
            remedy = "reset the adapter or reboot; update its firmware"
            found.append(one.fail(f"its firmware failed {times}", remedy, line))
        else:
            is_bad = count >= _FLAPS and age_s < RECENT_S
            found.append((one.fail if is_bad else one.warn)(f"its link was lost {times}", _LINK_REMEDY, line))
    return found or [check.ok("no link was lost")]


def check_gpudirect(check: Check, view: FabricView) -> list[Finding]:
    """Adapters may reach GPU memory (nvidia_peermem or DMA-BUF); else traffic goes through the host."""
    found, check = view.facts.gpudirect, check.expecting("nvidia_peermem, or DMA-BUF of the open driver")
    if found.works:
        return [check.ok(found.peer_memory or "DMA-BUF")]
    if not found.has_driver and not (view.facts.pci and view.facts.pci.gpus):
        return [check.skip("no GPU of NVIDIA")]
    if found.works is None:
        text = "no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read"
        return [check.unknown(text, "modprobe nvidia_peermem, or let the user read /proc/kallsyms")]
    return [check.fail("adapters cannot reach GPU memory", "modprobe nvidia_peermem (and have it loaded at boot)")]


def _by_name(ports: Sequence[HcaPort]) -> dict[str, HcaPort]:
    return {port.name: port for port in ports}


def _shown(port: HcaPort) -> str:
    told = f"state {port.state}, phys_state {port.phys_state}, rate {port.rate_gbps} Gb/s, {port.link_layer}"
    return f"{told}, {port.pci_address}"


def look_at_adapters(facts: NodeFacts) -> FabricView:
    """The ports for training. Raises UnreadableError, and NotApplicableError if there are none and none is expected."""
    view = FabricView.of(facts)
    if view.ports or facts.config.expected.hcas or facts.adapters.broken:
        return view
    why = "; ".join(f"{name} {reason}" for name, reason in list(view.reasons.items())[:4])
    raise NotApplicableError(f"no adapter for training{f': {why}' if why else ''}")


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have alike, where the configuration does not say the right number of ports."""
    try:
        view = look_at_adapters(facts)
    except NotApplicableError:
        return {"ib.count": "0"}
    layers = {port.link_layer for port in view.active}
    mtus = {port.mtu for port in view.active if port.link_layer == ETHERNET}
    return {
        "ib.link_layer": None if "" in layers else ", ".join(sorted(layers)),
        "ib.mtu": None if None in mtus else ", ".join(sorted(map(str, mtus))),
        "ib.rate": None if view.rate_gbps is None else f"{view.rate_gbps:g}",
        "ib.count": str(len(view.active)) if facts.config.expected.hcas is None else None,
    }


GROUPS = (
    CheckGroup(
        "ib",
        (
            *(check_count, check_state, check_rate, check_pcie, check_gid, check_mtu),
            *(check_counters, check_log, check_gpudirect),
        ),
        look=look_at_adapters,
        questions=(*ADAPTER_QUESTIONS, GPUDIRECT, KERNEL_LOG),
        settings=lambda _: {"BURST_COUNT_S": "1"},
        traits=_traits,
        compared={"ib.link_layer": "The ports for training speak the same on all nodes, InfiniBand or Ethernet."},
    ),
)
