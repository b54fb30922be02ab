"""Checks of what ports do over time: error counters, links that flap, firmware that fails; and GPUDirect."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cluster.checks.finding import Finding
from cluster.checks.ib_ports import ComputePorts
from cluster.checks.report import Report, age
from cluster.parse.fabric import HcaPort
from cluster.parse.infiniband import (
    Adapters,
    CounterSamples,
    GpuDirect,
    KernelEvent,
    KernelLog,
    parse_counters,
    parse_gpudirect,
    parse_kernel,
)
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import Section

# None of these grows on a sound link, not within the second between two samples.
_ERROR_COUNTERS = frozenset(
    {
        "excessive_buffer_overrun_errors",
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "port_rcv_errors",
        "port_rcv_remote_physical_errors",
        "symbol_error",
    }
)
# These grow when the network is crowded, too.
_CROWD_COUNTERS = frozenset(
    {"local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "port_xmit_discards", "rnr_nak_retry_err"}
)
# 8 bits wide; they stop at 255, so from there on no difference can be seen.
_NARROW_COUNTERS = ("link_downed", "link_error_recovery")
_NARROW_END = 255
# Reboots of node and switch count, too: below this nobody needs to look.
_MANY_LINK_LOSSES = 10
_LINK_DOWN = re.compile(r"\bLink down\b|Cable (unplugged|error)", re.IGNORECASE)
_SICK = re.compile(r"health compromised|fatal error|firmware internal error|in fatal sensors|device is in error", re.I)
_HOT = re.compile(r"high temperature", re.IGNORECASE)
_LIMITED = re.compile(r"(\d+\.\d+) Gb/s available PCIe bandwidth, limited by (.{1,120})")
# Links come up in several tries while the node boots.
_BOOT_S = 600.0
_RECENT_S = 86400.0
_FLAPS = 3
_LINK_REMEDY = "clean or swap the cable and its transceivers; look at the switch port"


def check_counters(report: Report, compute: ComputePorts, section: Section) -> list[Finding]:
    """Whether errors are being counted. Only what grows fails: what a counter stands at may be years old."""
    try:
        samples = parse_counters(section)
    except UnreadableError as error:
        return [report.unknown(str(error), "run the check again; see the evidence", error.evidence)]
    findings = [finding for port in compute.ports for finding in _port_counters(report.on(port.name), port, samples)]
    if findings:
        return findings
    if not compute.ports:
        return [report.unknown("no port to look at", "see ib.count")]
    return [report.ok("no errors were counted in a second")]


def check_kernel(node: str, compute: ComputePorts, section: Section) -> list[Finding]:
    """What the kernel says about the adapters for training: links that flap, firmware that fails, PCIe that is slow."""
    flaps, health = Report(node, "ib.flaps"), Report(node, "ib.health")
    try:
        log = parse_kernel(section)
    except UnreadableError as error:
        remedy = "let the user read the kernel log: group systemd-journal or adm, or kernel.dmesg_restrict=0"
        return [report.unknown(f"kernel log: {error}", remedy, error.evidence) for report in (flaps, health)]
    devices = {port.pci_address: port for port in compute.ports if port.pci_address}
    events: dict[str, list[KernelEvent]] = defaultdict(list)
    for event in log.events:
        events[event.address or ""].append(event)
    flapping: list[Finding] = []
    sick: list[Finding] = []
    for address, port in devices.items():
        flapping += _flaps(flaps.on(port.device), events[address], log)
        sick += _sickness(health.on(port.device), port, events[address])
    if not devices:
        return [report.unknown("no adapter has a known place on the PCI bus") for report in (flaps, health)]
    return (flapping or [flaps.ok("no link was lost")]) + (sick or [health.ok("no complaint in the kernel log")])


def check_gpudirect(report: Report, adapters: Adapters, section: Section) -> list[Finding]:
    """Whether adapters may reach GPU memory; else NCCL copies everything through host memory, without a word."""
    report = replace(report, expected="nvidia_peermem, or DMA-BUF of the open driver")
    try:
        found = parse_gpudirect(section)
    except UnreadableError as error:
        return [report.unknown(str(error), "run the check again; see the evidence", error.evidence)]
    ways = gpudirect_ways(found)
    if ways:
        return [report.ok(ways, found.peer_memory or "")]
    if not found.has_driver and not adapters.gpu_paths:
        return [report.skip("no GPU of NVIDIA")]
    if found.has_open_driver and found.kernel_has_dmabuf is None:
        text = "no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read"
        return [report.unknown(text, "modprobe nvidia_peermem, or let the user read /proc/kallsyms")]
    return [
        report.fail(
            "adapters cannot reach GPU memory",
            "modprobe nvidia_peermem (and have it loaded at boot)",
            f"kernel {found.kernel}",
        )
    ]


def gpudirect_ways(found: GpuDirect) -> str:
    """The ways from an adapter to GPU memory that are open, in words; empty without any."""
    ways = []
    if found.peer_memory:
        ways.append("nvidia_peermem" if "peermem" in found.peer_memory else "nv_peer_mem")
    if found.has_open_driver and found.kernel_has_dmabuf:
        ways.append("DMA-BUF")
    return " and ".join(ways)


def _port_counters(report: Report, port: HcaPort, samples: CounterSamples) -> Iterable[Finding]:
    now, grown = samples.second.get(port.name), samples.deltas(port.name)
    if not now or "link_downed" not in grown:
        if port.is_virtual_function:
            yield report.skip("a virtual function tells no error counters")
        else:
            yield report.unknown("its error counters are not readable", "look at ports/1/counters below /sys")
        return
    bad = {name: by for name, by in grown.items() if by > 0 and name in _ERROR_COUNTERS}
    crowded = {name: by for name, by in grown.items() if by > 0 and name in _CROWD_COUNTERS}
    reset = sorted(name for name, by in grown.items() if by < 0 and name in _ERROR_COUNTERS | _CROWD_COUNTERS)
    if bad:
        yield report.fail(f"errors are being counted: {_shown(bad)}", _LINK_REMEDY)
    if reset:
        yield report.unknown(f"{', '.join(reset)} went backwards: reset meanwhile", "run the check again")
    if crowded and not bad:
        yield report.warn(f"packets are lost or late: {_shown(crowded)}", "look for congestion or another job")
    for name in _NARROW_COUNTERS:
        value = now.get(name, 0)
        if value >= _NARROW_END:
            text = f"{name} stands at {value}, where it ends: new losses cannot be seen"
            yield report.warn(text, f"set it back (perfquery -R) and watch it; {_LINK_REMEDY} if it grows again")
        elif value >= _MANY_LINK_LOSSES and name not in bad:
            yield report.warn(f"{name} stands at {value}", f"watch it; {_LINK_REMEDY} if it grows")


def _shown(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} +{by}" for name, by in sorted(counters.items()))


def _flaps(report: Report, events: Iterable[KernelEvent], log: KernelLog) -> Iterable[Finding]:
    lost = [event for event in events if _LINK_DOWN.search(event.text) and (event.at_s is None or event.at_s > _BOOT_S)]
    if not lost:
        return
    ages = [_age_s(event, log) for event in lost]
    recent = sum(seconds < _RECENT_S for seconds in ages)
    last = "" if log.uptime_s is None else f", the last {age(ages[-1])} ago"
    text = f"its link was lost {len(lost)} time{'s' if len(lost) > 1 else ''} since boot{last}"
    make = report.fail if recent >= _FLAPS else report.warn
    yield make(text, _LINK_REMEDY, lost[-1].text)


def _age_s(event: KernelEvent, log: KernelLog) -> float:
    """0, so recent, when it cannot be told."""
    return 0.0 if event.at_s is None or log.uptime_s is None else max(0.0, log.uptime_s - event.at_s)


def _sickness(report: Report, port: HcaPort, events: Iterable[KernelEvent]) -> Iterable[Finding]:
    for pattern, text, make, remedy in (
        (_SICK, "its firmware failed", report.fail, "reset the adapter or reboot; update its firmware"),
        (_HOT, "it is too hot", report.warn, "look at fans and airflow"),
    ):
        said = [event for event in events if pattern.search(event.text)]
        if said:
            yield make(f"{text} ({len(said)} lines in the kernel log)", remedy, said[-1].text)
    for event in list(events)[::-1]:
        limited = _LIMITED.search(event.text)
        if limited is None:
            continue
        # Slow on the way to the adapter matters when it cannot feed the port; lanes of the adapter itself: ib.pcie.
        carried = float(limited[1])
        if port.rate_gbps is not None and carried < port.rate_gbps and port.pcie_width == port.pcie_width_max:
            text = f"PCIe carries {carried:.0f} Gb/s to it, its port {port.rate_gbps:g} Gb/s: limited by {limited[2]}"
            yield report.fail(text, "look at the slot, the riser and the PCIe settings of the BIOS", event.text)
        break
