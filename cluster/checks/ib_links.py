"""Checks of ports as they stand: how many are up, how fast, with what MTU, GID and PCIe link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.checks.finding import Finding
from cluster.checks.ib_ports import ETHERNET, ComputePorts, usual
from cluster.checks.report import Report
from cluster.parse.fabric import HcaPort
from cluster.parse.infiniband import Adapters, roce_gid_index
from engine.config_cluster import ExpectedHardware

# 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s on.
_PCIE_EFFICIENCY = {2.5: 0.8, 5.0: 0.8}
_PCIE_NEWER_EFFICIENCY = 128 / 130
# A packet of RoCE must fit one of 256, 512, 1024, 2048 and 4096 bytes and its headers into the MTU.
_ROCE_MTU = 4200
_NO_PORT = "no port is up to look at"
_STATE_REMEDIES = {
    "Polling": "nobody answers at the other end: look at the cable, its transceivers and the switch port",
    "Disabled": "the port is switched off: enable it (ibportstate, mlxlink --port_state UP) or its cable is missing",
    "LinkUp": "the link is there and no subnet manager has set up the port: look at opensm or the switch",
    "Sleep": "the port sleeps: wake it from the switch",
    "LinkErrorRecovery": "the link recovers from errors over and over: look at the cable and its transceivers",
}


def check_count(report: Report, compute: ComputePorts, adapters: Adapters, expected: ExpectedHardware) -> list[Finding]:
    """Whether enough ports are up: as many as configured, else all; and adapters that are lost or have no driver."""
    up, total = len(compute.active), len(compute.ports)
    left_out = "; ".join(f"{name}: {reason}" for name, reason in list(compute.reasons.items())[:8])
    observed = f"{up} of {total} ports for training are up" if up < total else f"{up} ports for training are up"
    report = replace(report, expected=f"{expected.hcas} (cluster.expected.hcas)" if expected.hcas else "")
    findings = _lost_adapters(report, compute, adapters, left_out)
    if expected.hcas and up < expected.hcas:
        findings.append(report.fail(observed, "see the ports that are down, and why others are left out", left_out))
    if findings:
        return findings
    if not up:
        return [report.fail(observed, "see ib.state", left_out)]
    if up < total and not expected.hcas:
        return [report.skip(f"{observed}; ib.state says which are not")]
    return [report.ok(observed, left_out)]


def _lost_adapters(report: Report, compute: ComputePorts, adapters: Adapters, left_out: str) -> list[Finding]:
    findings = []
    for path in adapters.driverless_paths:
        address = path[-1] if path else "an unknown address"
        text = f"the InfiniBand adapter at {address} has no driver"
        findings.append(report.on(address).fail(text, "modprobe mlx5_ib, or look for its error in dmesg"))
    for device in adapters.portless:
        text = "the adapter shows no port"
        findings.append(report.on(device).fail(text, "look for its error in dmesg; reset or swap it"))
    # That a GPU's adapter has no driver is told above.
    told = {path[:1] for path in adapters.driverless_paths}
    for path in compute.lonely_gpus:
        if path[:1] not in told:
            text = "no adapter is beside this GPU, while the others have one"
            remedy = "look for a lost adapter (lspci, dmesg); if the node is built so, set cluster.expected.hcas"
            findings.append(report.on(f"GPU at {path[-1]}").fail(text, remedy, left_out))
    return findings


def check_state(report: Report, compute: ComputePorts) -> list[Finding]:
    """Whether every port for training is up; one good port says nothing about the others."""
    report = replace(report, expected="ACTIVE, LinkUp")
    findings = []
    for port in compute.ports:
        if port.is_active:
            continue
        observed = f"{port.state or 'state not readable'}, {port.phys_state or 'physical state not readable'}"
        if not port.state or not port.phys_state:
            findings.append(report.on(port.name).unknown(observed, "look at /sys/class/infiniband on the node"))
            continue
        remedy = _STATE_REMEDIES.get(port.phys_state, "look at the cable, the switch port and dmesg")
        remedy += "; if it is not in use, say how many are: cluster.expected.hcas"
        findings.append(report.on(port.name).fail(observed, remedy, _evidence(port)))
    return findings or _all_ok(report, compute.ports, f"all {len(compute.ports)} are up")


def check_rate(report: Report, compute: ComputePorts) -> list[Finding]:
    """Whether every port that is up runs at the rate of the others, or the configured one."""
    rate = compute.rate_gbps
    report = replace(report, expected=f"{rate:g} Gb/s" if rate is not None else "")
    findings = []
    for port in compute.active:
        if port.rate_gbps is None:
            findings.append(report.on(port.name).unknown("its rate is not readable", "look at ibstat on the node"))
        elif rate is not None and port.rate_gbps < rate:
            text = f"{port.rate_gbps:g} Gb/s"
            remedy = "look at the cable (mlxlink -c), its transceivers and the speed of the switch port"
            findings.append(report.on(port.name).fail(text, remedy, _evidence(port)))
    return findings or _all_ok(report, compute.active, f"{rate:g} Gb/s on all" if rate is not None else "")


def check_mtu(report: Report, compute: ComputePorts) -> list[Finding]:
    """Whether the interfaces of ports have one MTU, and one that does not cut the packets of RoCE."""
    ports = [port for port in compute.active if port.netdev is not None and port.netdev_is_up is not False]
    if compute.active and not ports:
        return [report.skip("no port carries IP")]
    most = usual(port.netdev_mtu for port in ports if port.netdev_mtu is not None)
    report = replace(report, expected=f"{most:g}" if most is not None else "")
    findings = []
    for port in ports:
        where, mtu = report.on(port.name), port.netdev_mtu
        if mtu is None:
            findings.append(where.unknown(f"{port.netdev}: MTU not readable", f"look at ip link show {port.netdev}"))
        elif mtu != most:
            judge: Callable[[str, str], Finding] = where.fail if port.link_layer == ETHERNET else where.warn
            findings.append(judge(f"{port.netdev}: {mtu}", f"ip link set {port.netdev} mtu {most:g}"))
    if findings or not ports:
        return findings or [report.unknown(_NO_PORT)]
    if most is not None and most < _ROCE_MTU and any(port.link_layer == ETHERNET for port in ports):
        text = f"{most:g} on all: packets of RoCE are cut to 1024 bytes or less"
        return [report.warn(text, "an MTU of 9000 on interfaces and switches is usual")]
    return [report.ok(f"{most:g} on all")]


def check_pcie(report: Report, compute: ComputePorts) -> list[Finding]:
    """Whether every adapter has all its PCIe lanes, and PCIe is as fast as its port."""
    devices = {port.device: port for port in compute.ports}
    findings = []
    if devices and all(port.pcie_width is None and port.pcie_width_max is None for port in devices.values()):
        return [report.skip("this machine tells no width of PCIe links, as virtual machines do")]
    for name, port in devices.items():
        where, width, most = report.on(name), port.pcie_width, port.pcie_width_max
        if width is None or most is None or width > most:
            findings.append(
                where.unknown("its PCIe width makes no sense or is not readable", f"lspci -vv -s {port.pci_address}")
            )
            continue
        where = replace(where, expected=f"x{most}")
        carried = _pcie_gbps(port)
        if width < most:
            text = f"x{width}{f' at {port.pcie_gts:g} GT/s' if port.pcie_gts else ''}"
            findings.append(
                where.fail(text, f"seat the adapter or its riser anew ({port.pci_address}); look at the BIOS")
            )
        elif carried is None and port.is_active:
            findings.append(
                where.unknown("the speed of its PCIe lanes is not readable", f"lspci -vv -s {port.pci_address}")
            )
        elif carried is not None and port.rate_gbps is not None and port.is_active and carried < port.rate_gbps:
            text = f"x{width} at {port.pcie_gts:g} GT/s carries {carried:.0f} Gb/s, its port {port.rate_gbps:g} Gb/s"
            findings.append(where.fail(text, f"look at the speed of the slot in the BIOS ({port.pci_address})"))
    return findings or _all_ok(report, compute.ports, "all lanes are there")


def check_gid(report: Report, compute: ComputePorts) -> list[Finding]:
    """Whether every RoCE port has a GID of RoCE v2 over IPv4, all at one index: NCCL_IB_GID_INDEX is one number."""
    indices: dict[int, list[str]] = defaultdict(list)
    findings = []
    for port in compute.active:
        if port.link_layer != ETHERNET:
            continue
        index = roce_gid_index(port)
        if index is None:
            remedy = (
                f"give {port.netdev or 'its interface'} an IPv4 address; RoCE v2 must be on (cma_roce_mode, show_gids)"
            )
            findings.append(report.on(port.name).fail("no GID of RoCE v2 over IPv4", remedy))
        else:
            indices[index].append(port.name)
    if len(indices) > 1:
        text = "; ".join(f"index {index}: {', '.join(names)}" for index, names in sorted(indices.items()))
        remedy = "give the interfaces their addresses in the same order; NCCL from 2.21 on finds the index itself"
        findings.append(report.warn(text, remedy))
    shown = ", ".join(f"index {index}" for index in sorted(indices))
    return findings or _all_ok(report, [port for port in compute.active if port.link_layer == ETHERNET], shown)


def _pcie_gbps(port: HcaPort) -> float | None:
    if port.pcie_gts is None or port.pcie_width is None:
        return None
    return port.pcie_gts * port.pcie_width * _PCIE_EFFICIENCY.get(port.pcie_gts, _PCIE_NEWER_EFFICIENCY)


def _evidence(port: HcaPort) -> str:
    rate = "?" if port.rate_gbps is None else f"{port.rate_gbps:g} Gb/s"
    return f"state {port.state}, phys_state {port.phys_state}, rate {rate}, {port.link_layer}, {port.pci_address}"


def _all_ok(report: Report, looked_at: Sequence[HcaPort], text: str) -> list[Finding]:
    """OK, unless no port was looked at: all of none is no good news."""
    if not looked_at:
        return [report.unknown(_NO_PORT, "see ib.state")]
    return [report.ok(text)]
