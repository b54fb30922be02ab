"""How GPUs are connected: PCIe, NVLink, NVSwitches and the daemon that sets them up."""

from __future__ import annotations

from collections import Counter

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import GpuView, Opinion, gap_opinion, unknown
from cluster.parse.gpus_links import (
    FabricManager,
    GpuLinks,
    read_fabric_manager,
    read_nvlinks,
    read_p2p,
)
from cluster.parse.nvidia_smi import Gpu, SmiTrouble
from cluster.parse.nvidia_smi_xml import Gap

# How many NVLinks a GPU of this name has; bridged PCIe cards are not among them, for there it depends on the bridge.
NVLINKS_OF_MODEL = {
    "NVIDIA A100-SXM4-40GB": 12,
    "NVIDIA A100-SXM4-80GB": 12,
    "NVIDIA A800-SXM4-80GB": 8,
    "NVIDIA H100 80GB HBM3": 18,
    "NVIDIA H200": 18,
    "NVIDIA H20": 18,
    "NVIDIA H800": 8,
    "NVIDIA B200": 18,
}
_RESEAT = "drain the node and power it off and on; if it comes back, reseat or replace the board"


def check_pcie(view: GpuView) -> list[Finding]:
    """gpu.pcie: all lanes are up, and at full clocks the full generation, too: idle links slow down to save power."""
    lanes = {device.address: device for device in view.pci.gpus} if view.pci is not None else {}

    def judge(gpu: Gpu) -> Opinion | None:
        link, device = gpu.pcie, lanes.get(gpu.address)
        width = link.width
        top = device.width_max if link.width_max is Gap.NOT_SUPPORTED and device else link.width_max
        if width is Gap.NOT_SUPPORTED and device and device.width:
            width = device.width
        if top is None or isinstance(width, Gap) or isinstance(top, Gap):
            return gap_opinion(width if isinstance(width, Gap) else top or Gap.MISSING, "PCIe lanes")
        if width < top:
            return Opinion(Verdict.FAIL, f"{width:g} PCIe lanes", f"{top:g} lanes", _RESEAT)
        if isinstance(gpu.performance_state, Gap):
            return unknown("performance state: not told")
        if gpu.performance_state != "P0":
            return None
        now, best = link.generation, link.generation_max
        if isinstance(now, Gap) or isinstance(best, Gap):
            return gap_opinion(now if isinstance(now, Gap) else best, "PCIe generation")
        if now < best:
            return Opinion(Verdict.FAIL, f"PCIe generation {now:g} at P0", f"generation {best:g}", _RESEAT)
        return None

    return view.each("gpu.pcie", judge, "PCIe links at full width")


def check_nvlink(view: GpuView) -> list[Finding]:
    """gpu.nvlink: every link is up, every GPU has as many as the others, at the same speed."""
    check = "gpu.nvlink"
    links = read_nvlinks(view.probe.section("gpu.nvlink"))
    silent = view.unanswered(check)
    if silent:
        return silent
    if links is None:
        return [view.node(check, unknown("NVLinks cannot be read", evidence=_evidence(view, "gpu.nvlink")))]
    if not _expects_nvlink(view) and not any(gpu.active for gpu in links.values()):
        return [view.node(check, Opinion(Verdict.SKIP, "GPUs without NVLink"))]
    usual = Counter(len(gpu.links) for gpu in links.values()).most_common(1)[0][0] if links else 0
    speeds = Counter(speed for gpu in links.values() for speed in gpu.links.values() if speed is not None)
    speed = speeds.most_common(1)[0][0] if speeds else None

    def judge(gpu: Gpu) -> Opinion | None:
        wanted = NVLINKS_OF_MODEL.get(gpu.model, usual) if isinstance(gpu.model, str) else usual
        return _judge_links(links.get(gpu.index), wanted, speed)

    return view.each(check, judge, f"{usual} NVLinks of {speed} GB/s per GPU")


def check_p2p(view: GpuView) -> list[Finding]:
    """gpu.p2p: every GPU reaches every other over NVLink."""
    check = "gpu.p2p"
    silent = view.unanswered(check)
    if silent:
        return silent
    pairs = read_p2p(view.probe.section("gpu.p2p"))
    count = len(view.gpus)
    if pairs is None or ({index for pair in pairs for index in pair} != set(range(count)) and count > 1):
        return [view.node(check, unknown("the peer-to-peer matrix cannot be read", evidence=_evidence(view, check)))]
    if count == 1:
        return [view.node(check, Opinion(Verdict.SKIP, "one GPU"))]
    if not _expects_nvlink(view) and "OK" not in pairs.values():
        return [view.node(check, Opinion(Verdict.SKIP, "GPUs without NVLink"))]
    bad = {pair: word for pair, word in pairs.items() if word != "OK"}
    if not bad:
        return [view.node(check, Opinion(Verdict.OK, f"{len(pairs)} of {len(pairs)} pairs reach each other"))]
    words = ", ".join(f"GPU {i} to {j}: {word}" for (i, j), word in list(bad.items())[:4])
    remedy = "see gpu.nvlink and gpu.fabric_manager; NCCL falls back to PCIe and is many times slower"
    opinion = Opinion(Verdict.FAIL, f"{len(bad)} of {len(pairs)} pairs cannot", "all pairs", remedy, words)
    return [view.node(check, opinion)]


def check_fabric_manager(view: GpuView) -> list[Finding]:
    """gpu.fabric_manager: NVSwitches are set up, and by a daemon of the driver's version."""
    check = "gpu.fabric_manager"
    silent = view.unanswered(check)
    if silent:
        return silent
    states = view.each(check, _judge_fabric, "the NVLink fabric is set up")
    bad = [finding for finding in states if finding.severity in (Verdict.FAIL, Verdict.UNKNOWN)]
    if bad:
        return bad
    if view.pci is None:
        return [view.node(check, unknown("NVSwitches: PCI devices cannot be read from sysfs"))]
    if not view.pci.nvswitches:
        return states if states[0].severity is Verdict.OK else [view.node(check, Opinion(Verdict.SKIP, "no NVSwitch"))]
    manager = read_fabric_manager(view.probe.section(check))
    if manager is None:
        return [view.node(check, unknown("the fabric manager cannot be looked for", evidence=_evidence(view, check)))]
    return [view.node(check, _judge_manager(view, manager))]


def nvlink_trait(view: GpuView) -> str | None:
    """`18 x 26.562 GB/s`, what all nodes must agree on; None when it is not known."""
    links = read_nvlinks(view.probe.section("gpu.nvlink"))
    if not links:
        return None
    kinds = {f"{len(gpu.links)} x {speed:g} GB/s" for gpu in links.values() for speed in gpu.links.values() if speed}
    return ", ".join(sorted(kinds)) or "none"


def _judge_links(found: GpuLinks | None, wanted: int, speed: float | None) -> Opinion | None:
    if found is None:
        return unknown("not in the answer of `nvidia-smi nvlink --status`")
    remedy = f"see gpu.xid and gpu.fabric_manager; {_RESEAT}"
    if found.all_down or not found.active:
        return Opinion(Verdict.FAIL, "no NVLink is up", f"{wanted} links", remedy)
    if found.inactive:
        names = ", ".join(map(str, found.inactive))
        return Opinion(Verdict.FAIL, f"NVLink {names} inactive", f"{wanted} links up", remedy)
    if len(found.links) != wanted:
        return Opinion(Verdict.FAIL, f"{len(found.links)} NVLinks", f"{wanted} links", remedy)
    slow = [link for link, value in found.links.items() if value != speed]
    if slow:
        words = ", ".join(f"{link} at {found.links[link]:g} GB/s" for link in slow)
        return Opinion(Verdict.FAIL, f"NVLink {words}", f"{speed} GB/s, as other links here", remedy)
    return None


def _judge_fabric(gpu: Gpu) -> Opinion | None:
    """From Hopper on a GPU says itself whether it was let into the fabric; older ones say N/A or nothing."""
    if Gap.UNREADABLE in (gpu.fabric_state, gpu.fabric_status):
        return unknown("fabric state: unreadable")
    if isinstance(gpu.fabric_state, Gap):
        return Opinion(Verdict.SKIP, "fabric state: not supported by this GPU")
    if gpu.fabric_state == "Completed" and gpu.fabric_status in ("Success", Gap.MISSING):
        return None
    status = "" if isinstance(gpu.fabric_status, Gap) else f", {gpu.fabric_status}"
    remedy = "`systemctl restart nvidia-fabricmanager` while no program uses a GPU; see /var/log/fabricmanager.log"
    return Opinion(Verdict.FAIL, f"fabric state {gpu.fabric_state}{status}", "Completed, Success", remedy)


def _judge_manager(view: GpuView, manager: FabricManager) -> Opinion:
    driver = None if isinstance(view.smi, SmiTrouble) else view.smi.driver
    switches = len(view.pci.nvswitches) if view.pci is not None else 0
    if not manager.is_running:
        state = f" ({manager.unit})" if manager.unit else ""
        remedy = "`systemctl enable --now nvidia-fabricmanager`: without it CUDA programs fail to start on this node"
        return Opinion(
            Verdict.FAIL, f"fabric manager does not run{state}", f"running, for {switches} NVSwitches", remedy
        )
    if manager.unit == "failed":
        remedy = "`systemctl restart nvidia-fabricmanager`, see /var/log/fabricmanager.log"
        return Opinion(Verdict.FAIL, "the unit nvidia-fabricmanager failed", "active", remedy)
    if manager.version and isinstance(driver, str) and manager.version != driver:
        remedy = f"install nvidia-fabricmanager {driver}: it must be of the driver's very version"
        return Opinion(Verdict.FAIL, f"fabric manager {manager.version}", f"version {driver}", remedy)
    return Opinion(Verdict.OK, f"fabric manager runs, {switches} NVSwitches")


def _expects_nvlink(view: GpuView) -> bool:
    """Whether there must be NVLinks: NVSwitches are there, or boards that come with them."""
    switches = view.pci is None or bool(view.pci.nvswitches)
    return switches or any(gpu.model in NVLINKS_OF_MODEL for gpu in view.gpus)


def _evidence(view: GpuView, section: str) -> str:
    return view.probe.section(section).trouble() or "the answer is incomplete or of an unknown form"
