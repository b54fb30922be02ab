"""Checks of what ports do over time: error counters, links that flap, firmware that fails; and GPUDirect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.checks.finding import Check, Finding, age
from cluster.checks.group import CheckGroup
from cluster.checks.groups.ib import FabricView, look_at_adapters
from cluster.survey.adapters import GPUDIRECT, PORTS, GpuDirect, HcaPort, port_name, read_rows
from cluster.survey.kernel_log import KERNEL_LOG, KernelLog, read_kernel_log
from cluster.survey.nvidia_smi import LSPCI
from cluster.survey.section import Section, UnreadableError
from cluster.survey.sysfs import python_question

_STAMP = re.compile(r"\[ *(\d{1,12}\.\d{1,9})\]")
_KERNEL_DEVICE = re.compile(r"\bmlx[45]_core ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")
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
_LINK_DOWN = re.compile(r"\bLink down\b|Cable (unplugged|error)", re.IGNORECASE)
_SICK = re.compile(r"health compromised|fatal error|firmware internal error|in fatal sensors|device is in error", re.I)
_HOT = re.compile(r"high temperature", re.IGNORECASE)
_LIMITED = re.compile(r"(\d+\.\d+) Gb/s available PCIe bandwidth, limited by (.{1,120})")
# Links come up in several tries while the node boots.
_BOOT_S = 600.0
_RECENT_S = 86400.0
_FLAPS = 3
_LINK_REMEDY = "clean or swap the cable and its transceivers; look at the switch port"

COUNTERS = python_question(
    "ib.counters",
    30,
    r"""
rows = []
for sample in ("sample1", "sample2"):
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        told = {"dev": port.parts[-3], "port": port.name}
        for file in [*port.glob("counters/*"), *port.glob("hw_counters/*")]:
            # A rehearsal tree may hold what has grown meanwhile in a second tree beside sys.
            later = root / "sys-second" / file.relative_to(root / "sys")
            text = tell(later if sample == "sample2" and later.exists() else file)
            if text.isdecimal():
                told[file.name] = text
        rows.append([sample, told])
    if sample == "sample1" and rows:
        time.sleep(1)
print(json.dumps(rows))
""",
)


def check_counters(check: Check, view: FabricView) -> list[Finding]:
    """Errors that are being counted now, over two looks; what a counter stands at may be years old."""
    samples = read_counters(view.facts.section(COUNTERS))
    found = [one for port in view.ports for one in _judge_counters(check.on(port.name), port, samples)]
    if not view.ports:
        return [check.unknown("no port is up to look at", "see ib.count")]
    return found or [check.ok("no errors were counted in a second")]


def read_counters(section: Section) -> Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]]:
    """Counters of each port (`mlx5_0:1`) by name, and the same about a second later. Raises UnreadableError."""
    samples: dict[str, dict[str, Mapping[str, int]]] = {"sample1": {}, "sample2": {}}
    for word, fields in read_rows(section):
        if word in samples:
            told = {name: text for name, text in fields.items() if name not in ("dev", "port")}
            if not all(text.isdecimal() for text in told.values()):
                raise UnreadableError(f"{section.name}: not every counter is a number")
            samples[word][port_name(fields, section.name)] = {name: int(text) for name, text in told.items()}
    first, second = samples.values()
    if first.keys() != second.keys():
        raise UnreadableError(f"{section.name}: the two samples are not about the same ports")
    return {port: (first[port], second[port]) for port in first}


@dataclass(frozen=True)
class KernelEvent:
    """A line of the kernel log about the adapter at a PCI address. at_s: seconds after boot; age_s: before now. A line
    without a time counts as of now."""

    address: str
    text: str
    at_s: float
    age_s: float


def check_flaps(check: Check, view: FabricView) -> list[Finding]:
    """What the kernel logged of links that go up and down."""
    found = [finding for port, events in _events(view) for finding in _flaps(check.on(port.device), events)]
    return found or [check.ok("no link was lost")]


def check_health(check: Check, view: FabricView) -> list[Finding]:
    """What the kernel logged of adapters: failing firmware, PCIe links that are too slow."""
    found = [finding for port, events in _events(view) for finding in _sickness(check.on(port.device), port, events)]
    return found or [check.ok("no complaint in the kernel log")]


def _events(view: FabricView) -> list[tuple[HcaPort, list[KernelEvent]]]:
    """What the log says of each adapter for training. Raises UnreadableError."""
    log = _read_events(read_kernel_log(view.facts.probe))
    devices = {port.pci_address: port for port in view.ports if port.pci_address}
    if not devices:
        raise UnreadableError("no adapter has a known place on the PCI bus")
    return [(port, [event for event in log if event.address == address]) for address, port in devices.items()]


def _read_events(log: KernelLog) -> list[KernelEvent]:
    """What the drivers of adapters said since boot."""
    events = []
    for text in log.lines:
        stamp, address = _STAMP.match(text), _KERNEL_DEVICE.search(text)
        if address is not None:
            at_s = float(stamp[1]) if stamp else math.inf
            events.append(KernelEvent(address[1], text, at_s, max(0.0, (log.uptime_s or 0.0) - at_s)))
    return events


def check_gpudirect(check: Check, view: FabricView) -> list[Finding]:
    """Adapters may reach GPU memory (nvidia_peermem or DMA-BUF); else traffic goes through the host."""
    found = view.facts.gpudirect
    check, ways = check.expecting("nvidia_peermem, or DMA-BUF of the open driver"), gpudirect_ways(found)
    if ways:
        return [check.ok(ways, found.peer_memory or "")]
    if not found.has_driver and not (view.facts.pci and view.facts.pci.gpus):
        return [check.skip("no GPU of NVIDIA")]
    if found.has_open_driver and found.kernel_has_dmabuf is None:
        text = "no module nvidia_peermem; whether the kernel has DMA-BUF cannot be read"
        return [check.unknown(text, "modprobe nvidia_peermem, or let the user read /proc/kallsyms")]
    remedy = "modprobe nvidia_peermem (and have it loaded at boot)"
    return [check.fail("adapters cannot reach GPU memory", remedy, f"kernel {found.kernel}")]


def gpudirect_ways(found: GpuDirect) -> str:
    """The ways from an adapter to GPU memory that are open, in words; empty without any."""
    ways = []
    if found.peer_memory:
        ways.append("nvidia_peermem" if "peermem" in found.peer_memory else "nv_peer_mem")
    if found.has_open_driver and found.kernel_has_dmabuf:
        ways.append("DMA-BUF")
    return " and ".join(ways)


def _judge_counters(
    check: Check, port: HcaPort, samples: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]]
) -> Iterable[Finding]:
    before, now = samples.get(port.name, ({}, {}))
    grown = {name: now[name] - value for name, value in before.items() if name in now}
    if "link_downed" not in grown:
        if port.is_virtual_function:
            yield check.skip("a virtual function tells no error counters")
        else:
            yield check.unknown("its error counters are not readable", "look at ports/1/counters below /sys")
        return
    bad = {name: by for name, by in grown.items() if by > 0 and name in _ERROR_COUNTERS}
    crowded = {name: by for name, by in grown.items() if by > 0 and name in _CROWD_COUNTERS}
    if bad:
        yield check.fail(f"errors are being counted: {_shown(bad)}", _LINK_REMEDY)
    if crowded and not bad:
        yield check.warn(f"packets are lost or late: {_shown(crowded)}", "look for congestion or another job")


def _shown(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} +{by}" for name, by in sorted(counters.items()))


def _flaps(check: Check, events: Iterable[KernelEvent]) -> Iterable[Finding]:
    lost = [event for event in events if _LINK_DOWN.search(event.text) and event.at_s > _BOOT_S]
    if lost:
        last = f"the last {age(lost[-1].age_s)} ago"
        text = f"its link was lost {len(lost)} time{'s' if len(lost) > 1 else ''} since boot, {last}"
        recent = sum(event.age_s < _RECENT_S for event in lost)
        yield (check.fail if recent >= _FLAPS else check.warn)(text, _LINK_REMEDY, lost[-1].text)


def _sickness(check: Check, port: HcaPort, events: Iterable[KernelEvent]) -> Iterable[Finding]:
    for pattern, text, make, remedy in (
        (_SICK, "its firmware failed", check.fail, "reset the adapter or reboot; update its firmware"),
        (_HOT, "it is too hot", check.warn, "look at fans and airflow"),
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
            yield check.fail(text, "look at the slot, the riser and the PCIe settings of the BIOS", event.text)
        break


GROUP = CheckGroup(
    "ib",
    (check_counters, check_flaps, check_health, check_gpudirect),
    look=look_at_adapters,
    questions=(PORTS, LSPCI, COUNTERS, GPUDIRECT, KERNEL_LOG),
)
