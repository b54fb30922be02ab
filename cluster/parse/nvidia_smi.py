"""What `nvidia-smi -q -x` says, over generations of the driver, as values."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache
from xml.etree.ElementTree import Element

from cluster.parse.nvidia_smi_xml import (
    Gap,
    Number,
    Word,
    add_up,
    broken_fields,
    first_number,
    normal_address,
    parse_xml,
    paths,
    read_number,
    read_word,
)
from cluster.probe.section import Section
from cluster.remote_text import one_line

MAX_GPUS = 256


# Bits of the mask of throttle reasons, by the end of the element's name; its beginning changed with driver 535.
THROTTLE_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}


class SmiFailure(enum.Enum):
    """The different ways in which nvidia-smi does not answer; each has its own remedy."""

    NOT_INSTALLED = "not installed"
    NO_ANSWER = "no answer"  # it hangs, or was not asked because it hung before
    GPU_LOST = "a GPU is lost"
    NO_DRIVER = "no driver"
    MISMATCH = "driver and library differ"
    NO_DEVICES = "no devices"
    FAILED = "failed"
    CUT_OFF = "cut off"
    NOT_XML = "not XML"


@dataclass(frozen=True)
class SmiTrouble:
    """Why there is nothing to read. address: of the lost GPU, `0000:1b:00.0`. evidence: the line that says so."""

    failure: SmiFailure
    evidence: str
    address: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU. kind: C compute, G graphics, or both."""

    pid: int
    kind: str
    name: str
    used_mib: Number


@dataclass(frozen=True)
class PcieLink:
    """Lanes and generation now and at most."""

    width: Number
    width_max: Number
    generation: Number
    generation_max: Number


@dataclass(frozen=True)
class EccState:
    """Modes are Enabled or Disabled. volatile: since the driver loaded; aggregate: over the life of the board."""

    mode: Word
    pending: Word
    volatile_uncorrectable: Number
    aggregate_sram_uncorrectable: Number
    sram_threshold_exceeded: Word


@dataclass(frozen=True)
class RowRemap:
    """Rows of memory replaced by spare ones. repairs: other repairs that wait or are impossible, as `name: Yes`."""

    remapped: Number
    pending: Word
    failure: Word
    retirement_pending: Word = Gap.NOT_SUPPORTED
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clocks:
    """MHz. application: what was set for compute; default: what it is from the factory."""

    sm_max: Number
    memory_max: Number
    application: Number
    application_default: Number


@dataclass(frozen=True)
class Gpu:
    """One GPU. index: as nvidia-smi counts. address: `0000:1b:00.0`. throttle: mask of active reasons.

    broken: fields that the driver could not read, as `name: what it said`.
    """

    index: int
    address: str
    model: Word
    uuid: Word
    performance_state: Word
    mig: Word
    mig_pending: Word
    used_mib: Number
    recovery_action: Word
    throttle: int | Gap
    power_limit_w: Number
    power_default_w: Number
    fabric_state: Word
    fabric_status: Word
    pcie: PcieLink
    ecc: EccState
    remap: RowRemap
    clocks: Clocks
    processes: tuple[GpuProcess, ...] | Gap
    broken: tuple[str, ...]

    @property
    def device(self) -> str:
        """`GPU 3`."""
        return f"GPU {self.index}"


@dataclass(frozen=True)
class SmiLog:
    """One answer. attached: how many GPUs the driver counts. notes: what was printed around the XML."""

    driver: Word
    attached: Number
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=64)  # checks and traits read the same answer; a long one takes 10 ms
def read_smi(section: Section) -> SmiLog | SmiTrouble:
    """The answer in `section`, or why there is none that may be believed."""
    if section.tool_missing:
        return SmiTrouble(SmiFailure.NOT_INSTALLED, "nvidia-smi is not installed")
    if not section.ok:
        return _trouble(section)
    text = section.output
    begin, end = _DOCUMENT.search(text), text.rfind(_CLOSING)
    if begin is None:
        return _message(text) or SmiTrouble(SmiFailure.NOT_XML, one_line(text) or "an empty answer")
    if end < 0:
        return _message(text) or SmiTrouble(SmiFailure.CUT_OFF, f"the answer ends with: {one_line(text[-80:])}")
    end += len(_CLOSING)
    try:
        root = parse_xml(text[begin.start() : end])
    except ValueError as error:
        return SmiTrouble(SmiFailure.NOT_XML, one_line(str(error)))
    around = f"{text[: begin.start()]}\n{text[end:]}"
    notes = tuple(one_line(line) for line in around.splitlines() if line.strip())
    elements = root.findall("gpu")
    if root.tag != "nvidia_smi_log" or len(elements) > MAX_GPUS:
        return SmiTrouble(SmiFailure.NOT_XML, f"element {one_line(root.tag)} with {len(elements)} GPUs")
    gpus = tuple(_gpu(index, element) for index, element in enumerate(elements))
    return SmiLog(read_word(root, "driver_version"), read_number(root, "attached_gpus"), gpus, notes)


_DOCUMENT = re.compile(r"<\?xml|<nvidia_smi_log>")
_CLOSING = "</nvidia_smi_log>"
_MESSAGES = (
    (SmiFailure.GPU_LOST, re.compile(r"unable to determine the device handle|GPU is lost|fallen off the bus", re.I)),
    (SmiFailure.MISMATCH, re.compile(r"driver/library version mismatch", re.I)),
    (SmiFailure.NO_DRIVER, re.compile(r"couldn't communicate with the NVIDIA driver|driver is not loaded", re.I)),
    (SmiFailure.NO_DEVICES, re.compile(r"no devices were found", re.I)),
)


def _trouble(section: Section) -> SmiTrouble:
    if section.exit_code is None and "cut" not in section.state.value:
        return SmiTrouble(SmiFailure.NO_ANSWER, section.trouble())
    said = _message(section.output)
    if said is not None:
        return said
    if section.exit_code is None:
        return SmiTrouble(SmiFailure.CUT_OFF, section.trouble())
    words = one_line(section.output[-400:])
    return SmiTrouble(SmiFailure.FAILED, f"exit code {section.exit_code}{f': {words}' if words else ''}")


def _message(text: str) -> SmiTrouble | None:
    """The known complaint in `text`, if any."""
    for failure, pattern in _MESSAGES:
        for line in text.splitlines():
            if pattern.search(line):
                return SmiTrouble(failure, one_line(line), normal_address(line))
    return None


def _gpu(index: int, node: Element) -> Gpu:
    return Gpu(
        index=index,
        address=normal_address(node.get("id", "")) or one_line(node.get("id", ""), 40),
        model=read_word(node, "product_name"),
        uuid=read_word(node, "uuid"),
        performance_state=read_word(node, "performance_state"),
        mig=read_word(node, "mig_mode/current_mig"),
        mig_pending=read_word(node, "mig_mode/pending_mig"),
        used_mib=read_number(node, "fb_memory_usage/used"),
        recovery_action=_recovery_action(node),
        throttle=_throttle(node),
        power_limit_w=first_number(node, paths(_POWER, "current_power_limit", "enforced_power_limit", "power_limit")),
        power_default_w=first_number(node, paths(_POWER, "default_power_limit")),
        fabric_state=read_word(node, "fabric/state"),
        fabric_status=read_word(node, "fabric/status"),
        pcie=_pcie(node),
        ecc=_ecc(node),
        remap=_remap(node),
        clocks=_clocks(node),
        processes=_processes(node),
        broken=tuple(broken_fields(node)),
    )


_POWER = ("gpu_power_readings", "power_readings")


def _recovery_action(node: Element) -> Word:
    """`None`, or what the driver asks for. Before driver 570 there were two yes-or-no fields instead."""
    action = read_word(node, "gpu_recovery_action")
    if action is not Gap.MISSING:
        return action
    asks = [read_word(node, f"gpu_reset_status/{name}") for name in ("reset_required", "drain_and_reset_recommended")]
    if "Yes" in asks:
        return "Reset" if asks[0] == "Yes" else "Drain and Reset"
    if asks == ["No", "No"]:
        return "None"
    return next((gap for gap in (Gap.UNREADABLE, Gap.MISSING) if gap in asks), Gap.NOT_SUPPORTED)


def _throttle(node: Element) -> int | Gap:
    for word in ("event", "throttle"):
        parent = node.find(f"clocks_{word}_reasons")
        if parent is None:
            continue
        states = {name: read_word(node, f"clocks_{word}_reasons/clocks_{word}_reason_{name}") for name in THROTTLE_BITS}
        if Gap.UNREADABLE in states.values():
            return Gap.UNREADABLE
        if states["hw_slowdown"] not in ("Active", "Not Active"):
            return Gap.NOT_SUPPORTED if states["hw_slowdown"] is Gap.NOT_SUPPORTED else Gap.UNREADABLE
        return sum(bit for name, bit in THROTTLE_BITS.items() if states[name] == "Active")
    return Gap.MISSING


def _pcie(node: Element) -> PcieLink:
    link = "pci/pci_gpu_link_info"
    return PcieLink(
        width=read_number(node, f"{link}/link_widths/current_link_width"),
        width_max=read_number(node, f"{link}/link_widths/max_link_width"),
        generation=read_number(node, f"{link}/pcie_gen/current_link_gen"),
        generation_max=read_number(node, f"{link}/pcie_gen/max_link_gen"),
    )


def _ecc(node: Element) -> EccState:
    """Up to driver 525 one SRAM counter, then two by kind; before Ampere counters by single and double bit."""
    sram = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
    counters = [*paths(["ecc_errors/volatile"], *sram, "dram_uncorrectable"), "ecc_errors/volatile/double_bit/total"]
    return EccState(
        mode=read_word(node, "ecc_mode/current_ecc"),
        pending=read_word(node, "ecc_mode/pending_ecc"),
        volatile_uncorrectable=add_up(read_number(node, path) for path in counters),
        aggregate_sram_uncorrectable=add_up(read_number(node, path) for path in paths(["ecc_errors/aggregate"], *sram)),
        sram_threshold_exceeded=read_word(node, "ecc_errors/aggregate/sram_threshold_exceeded"),
    )


def _remap(node: Element) -> RowRemap:
    repairs = ("channel_repair_pending", "tpc_repair_pending", "unrepairable_memory")
    found = {name: read_word(node, f"ecc_errors/{name}") for name in repairs}
    retirement = [read_word(node, f"retired_pages/{name}") for name in ("pending_retirement", "pending_blacklist")]
    return RowRemap(
        remapped=add_up(read_number(node, f"remapped_rows/remapped_row_{kind}") for kind in ("corr", "unc")),
        pending=read_word(node, "remapped_rows/remapped_row_pending"),
        failure=read_word(node, "remapped_rows/remapped_row_failure"),
        retirement_pending="Yes" if "Yes" in retirement else retirement[0],
        repairs=tuple(f"{name.replace('_', ' ')}: {value}" for name, value in found.items() if value == "Yes"),
    )


def _clocks(node: Element) -> Clocks:
    return Clocks(
        sm_max=read_number(node, "max_clocks/sm_clock"),
        memory_max=read_number(node, "max_clocks/mem_clock"),
        application=read_number(node, "applications_clocks/graphics_clock"),
        application_default=read_number(node, "default_applications_clocks/graphics_clock"),
    )


def _processes(node: Element) -> tuple[GpuProcess, ...] | Gap:
    parent = node.find("processes")
    if parent is None:
        return Gap.MISSING
    if not len(parent) and (parent.text or "").strip():
        word = read_word(node, "processes")
        return word if isinstance(word, Gap) else ()
    found = []
    for info in parent.findall("process_info"):
        pid = read_number(info, "pid")
        kind, name = read_word(info, "type"), read_word(info, "process_name")
        found.append(
            GpuProcess(
                pid=0 if isinstance(pid, Gap) else int(pid),
                kind="?" if isinstance(kind, Gap) else kind,
                name="?" if isinstance(name, Gap) else name,
                used_mib=read_number(info, "used_memory"),
            )
        )
    return tuple(found)
