"""Are all GPUs there, do they answer, and are they of one kind?"""

from __future__ import annotations

from collections import Counter

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import GpuView, Opinion, gap_opinion, spread, unknown
from cluster.parse.nvidia_smi import Gpu, SmiFailure, SmiLog, SmiTrouble
from cluster.parse.nvidia_smi_xml import Gap

_DMESG = "look for NVRM and Xid in `dmesg` on the node"
_REMEDIES = {
    SmiFailure.NOT_INSTALLED: "install the NVIDIA driver with its tools, or put nvidia-smi into PATH for ssh commands",
    SmiFailure.NO_ANSWER: f"the driver or a GPU is stuck: {_DMESG}, drain the node and reboot it",
    SmiFailure.GPU_LOST: "see gpu.lost",
    SmiFailure.NO_DRIVER: "load the kernel module (`modprobe nvidia`); after a kernel update reinstall the driver",
    SmiFailure.MISMATCH: "the driver was updated under a loaded module: stop what uses GPUs and reboot the node",
    SmiFailure.NO_DEVICES: f"the driver finds no GPU: {_DMESG}, reboot the node",
    SmiFailure.FAILED: f"run `nvidia-smi` on the node; {_DMESG}",
    SmiFailure.CUT_OFF: f"nvidia-smi died in the middle of its answer: {_DMESG}, reboot the node",
    SmiFailure.NOT_XML: "run `nvidia-smi -q -x` on the node: another program of that name may come first in PATH",
}


def check_nvidia_smi(view: GpuView) -> list[Finding]:
    """gpu.nvidia_smi: the tool that all else rests on answers, wholly and in time."""
    if isinstance(view.smi, SmiLog):
        if view.smi.notes:
            note = view.smi.notes[0]
            opinion = Opinion(Verdict.WARN, f"nvidia-smi warns: {note}", "no warnings", f"{_DMESG}", note)
        else:
            opinion = Opinion(Verdict.OK, f"{len(view.gpus)} GPUs answer")
        return [view.node("gpu.nvidia_smi", opinion)]
    trouble = view.smi
    # A lost GPU is the cause, and a finding of its own; what nvidia-smi could say about the others stays unknown.
    severity = Verdict.UNKNOWN if trouble.failure is SmiFailure.GPU_LOST else Verdict.FAIL
    observed = f"nvidia-smi: {trouble.failure.value}"
    remedy = _REMEDIES[trouble.failure]
    return [view.node("gpu.nvidia_smi", Opinion(severity, observed, "an answer", remedy, trouble.evidence))]


def check_lost(view: GpuView) -> list[Finding]:
    """gpu.lost: no GPU is out of reach of the driver."""
    check = "gpu.lost"
    remedy = "drain and reboot the node; if it comes back, reseat or replace the GPU"
    if isinstance(view.smi, SmiTrouble) and view.smi.failure is SmiFailure.GPU_LOST:
        place = view.smi.address
        device = view.device(place) if place is not None else None
        where = f" at {place}" if place else ""
        opinion = Opinion(Verdict.FAIL, f"the driver cannot reach the GPU{where}", "", remedy, view.smi.evidence)
        return [view.node(check, opinion, device)]

    def judge(gpu: Gpu) -> Opinion | None:
        if not gpu.broken:
            return None
        words = f"{len(gpu.broken)} fields cannot be read"
        return Opinion(Verdict.FAIL, words, "every field readable", remedy, "; ".join(gpu.broken[:5]))

    return view.each(check, judge, "the driver reaches every GPU")


def check_count(view: GpuView) -> list[Finding]:
    """gpu.count: nvidia-smi, the driver's own count, PCI and the configuration agree."""
    check = "gpu.count"
    if isinstance(view.smi, SmiTrouble):
        return view.unanswered(check)
    listed = len(view.gpus)
    counts = {"nvidia-smi": listed}
    if isinstance(view.smi.attached, Gap):
        return [view.node(check, unknown("nvidia-smi does not say how many GPUs are attached"))]
    counts["driver"] = int(view.smi.attached)
    if view.pci is None or view.pci.total == 0:
        reason = "PCI devices cannot be read from sysfs"
        return [view.node(check, unknown(reason, evidence=view.probe.section("gpu.lspci").trouble()))]
    counts["PCI"] = len(view.pci.gpus)
    expected = view.config.expected.gpus
    wanted = max(counts.values()) if expected is None else expected
    if set(counts.values()) == {wanted} and wanted:
        return [view.node(check, Opinion(Verdict.OK, f"{listed} GPUs"))]
    observed = ", ".join(f"{count} by {source}" for source, count in counts.items())
    seen = {gpu.address for gpu in view.gpus}
    missing = [gpu.address for gpu in view.pci.gpus if gpu.address not in seen]
    evidence = f"not in nvidia-smi: {', '.join(missing)}" if missing else ""
    remedy = f"{_DMESG}; drain and reboot the node, and check what cluster.expected.gpus says"
    opinion = Opinion(Verdict.FAIL, observed, f"{wanted} GPUs" if wanted else "at least one GPU", remedy, evidence)
    return [view.node(check, opinion)]


def check_model(view: GpuView) -> list[Finding]:
    """gpu.model: one model, the expected one."""
    silent, expected = view.unanswered("gpu.model"), view.config.expected.gpu_model
    if silent:
        return silent
    known = Counter(gpu.model for gpu in view.gpus if isinstance(gpu.model, str))
    usual = known.most_common(1)[0][0] if known else ""

    def judge(gpu: Gpu) -> Opinion | None:
        if isinstance(gpu.model, Gap):
            return unknown(f"model: {gpu.model.value}")
        if expected is not None and expected not in gpu.model:
            remedy = "take the node out of the list, or correct cluster.expected.gpu_model"
            return Opinion(Verdict.FAIL, f"model {gpu.model}", f"model {expected}", remedy)
        if gpu.model != usual:
            remedy = "replace the GPU: ranks of one job wait for the slowest"
            return Opinion(Verdict.FAIL, f"model {gpu.model}", f"model {usual}, as most GPUs of the node", remedy)
        return None

    return view.each("gpu.model", judge, f"model {spread(known)}")


def check_driver(view: GpuView) -> list[Finding]:
    """gpu.driver: the expected version."""
    expected = view.config.expected.driver
    if isinstance(view.smi, SmiTrouble):
        return view.unanswered("gpu.driver")
    driver = view.smi.driver
    opinion = gap_opinion(driver, "driver version") or Opinion(Verdict.OK, f"driver {driver}")
    if opinion.severity is Verdict.SKIP:
        opinion = unknown("driver version: N/A")
    if isinstance(driver, str) and expected is not None and not _begins_with(driver, expected):
        remedy = f"install driver {expected} on the node, or correct cluster.expected.driver"
        opinion = Opinion(Verdict.FAIL, f"driver {driver}", f"driver {expected}", remedy)
    return [view.node("gpu.driver", opinion)]


def check_mig(view: GpuView) -> list[Finding]:
    """gpu.mig: no GPU is cut into instances: a rank takes a whole one."""
    remedy = "switch it off with `nvidia-smi -mig 0` and reset the GPU"
    modes = {gpu.mig for gpu in view.gpus}

    def judge(gpu: Gpu) -> Opinion | None:
        if gpu.mig is Gap.NOT_SUPPORTED:
            return None  # not MIG at all: a whole GPU, too
        gap = gap_opinion(gpu.mig, "MIG mode")
        if gap is not None:
            return gap
        if gpu.mig != "Disabled":
            severity = Verdict.WARN if len(modes) == 1 else Verdict.FAIL
            return Opinion(severity, f"MIG {gpu.mig}", "MIG Disabled on every GPU", remedy)
        if gpu.mig_pending not in (gpu.mig, Gap.NOT_SUPPORTED, Gap.MISSING):
            return Opinion(Verdict.WARN, f"MIG will be {gpu.mig_pending} after a reset", "MIG Disabled", remedy)
        return None

    return view.each("gpu.mig", judge, "MIG is off")


def _begins_with(version: str, expected: str) -> bool:
    """`550.54.15` fits `550`, `550.54` and itself, but not `55`."""
    return version == expected or version.startswith(expected.rstrip(".") + ".")
