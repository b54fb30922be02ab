"""Memory of the GPUs: errors, repairs, and whether somebody else uses it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import AGAIN_SECTION, GpuView, Opinion, gap_opinion, unknown
from cluster.parse.nvidia_smi import Gpu, GpuProcess, SmiTrouble
from cluster.parse.nvidia_smi_xml import Gap
from cluster.probe.section import Section
from cluster.remote_text import one_line

VOLATILE_UNCORRECTABLE_FAIL = 1  # errors since the driver loaded
SRAM_AGGREGATE_WARN = 1  # errors over the life of the board
REMAPPED_ROWS_WARN = 512  # rows replaced; the spare ones run out
IDLE_MEMORY_MIB = 15  # what an idle driver holds at most
APPS_SECTION = "gpu.apps"

_HIDDEN = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"
_RESET = "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot"


def check_recovery(view: GpuView) -> list[Finding]:
    """gpu.recovery: the driver asks for no reset or reboot."""

    def judge(gpu: Gpu) -> Opinion | None:
        action = gpu.recovery_action
        if isinstance(action, Gap):
            # Drivers before 525 have neither field.
            return gap_opinion(Gap.NOT_SUPPORTED if action is Gap.MISSING else action, "recovery action")
        if action == "None":
            return None
        remedy = "drain and reboot the node" if "reboot" in action.lower() else _RESET
        return Opinion(Verdict.FAIL, f"the driver asks for: {action}", "no recovery action", remedy)

    return view.each("gpu.recovery", judge, "no reset is required")


def check_ecc_mode(view: GpuView) -> list[Finding]:
    """gpu.ecc_mode: errors of the memory are corrected and counted."""

    def judge(gpu: Gpu) -> Opinion | None:
        gap = gap_opinion(gpu.ecc.mode, "ECC")
        if gap is not None:
            return gap
        remedy = "`nvidia-smi -e 1` and a reset; without ECC a flipped bit goes into the weights unseen"
        if gpu.ecc.mode != "Enabled":
            return Opinion(Verdict.WARN, f"ECC {gpu.ecc.mode}", "ECC Enabled", remedy)
        if gpu.ecc.pending not in ("Enabled", Gap.NOT_SUPPORTED, Gap.MISSING):
            return Opinion(Verdict.WARN, f"ECC pending: {_say(gpu.ecc.pending)}", "ECC Enabled", remedy)
        return None

    return view.each("gpu.ecc_mode", judge, "ECC is on")


def check_ecc(view: GpuView) -> list[Finding]:
    """gpu.ecc: no uncorrectable error since the driver loaded."""

    def judge(gpu: Gpu) -> Opinion | None:
        errors = gpu.ecc.volatile_uncorrectable
        if isinstance(errors, Gap):
            # A GPU that counts errors and does not tell them is not known to be healthy.
            told = errors if gpu.ecc.mode != "Enabled" or errors is not Gap.NOT_SUPPORTED else Gap.UNREADABLE
            return gap_opinion(told, "uncorrectable ECC errors")
        if errors < VOLATILE_UNCORRECTABLE_FAIL:
            return None
        return Opinion(Verdict.FAIL, f"{errors:.0f} uncorrectable ECC errors since the driver loaded", "0", _RESET)

    return view.each("gpu.ecc", judge, "no uncorrectable ECC errors")


def check_sram(view: GpuView) -> list[Finding]:
    """gpu.sram: uncorrectable errors of caches over the life of the board; past the threshold it is replaced."""
    remedy = "run the maker's field diagnostic; past the threshold the board is replaced"

    def judge(gpu: Gpu) -> Opinion | None:
        errors = gpu.ecc.aggregate_sram_uncorrectable
        if gpu.ecc.sram_threshold_exceeded == "Yes":
            return Opinion(Verdict.FAIL, "SRAM error threshold exceeded", "not exceeded", remedy)
        if gpu.ecc.sram_threshold_exceeded is Gap.UNREADABLE:
            return unknown("SRAM error threshold: unreadable")
        if isinstance(errors, Gap):
            told = errors if gpu.ecc.mode != "Enabled" or errors is Gap.UNREADABLE else Gap.NOT_SUPPORTED
            return gap_opinion(told, "SRAM errors")
        if errors < SRAM_AGGREGATE_WARN:
            return None
        return Opinion(Verdict.WARN, f"{errors:.0f} uncorrectable SRAM errors in the life of the board", "0", remedy)

    return view.each("gpu.sram", judge, "no uncorrectable SRAM errors")


def check_row_remap(view: GpuView) -> list[Finding]:
    """gpu.row_remap: no repair of the memory waits or has failed. A literal N/A is no failure."""

    def judge(gpu: Gpu) -> Opinion | None:
        remap = gpu.remap
        if remap.failure == "Yes":
            remedy = "replace the GPU: no spare rows are left where they are needed"
            return Opinion(Verdict.FAIL, "a row remapping failed", "no failure", remedy)
        waiting = remap.pending == "Yes" or remap.retirement_pending == "Yes"
        if waiting or remap.repairs:
            words = "; ".join(remap.repairs) if remap.repairs else "a row remapping waits for a reset"
            return Opinion(Verdict.FAIL, words, "nothing pending", _RESET)
        if remap.pending is Gap.MISSING and remap.retirement_pending == "No":
            return None  # before Ampere pages were retired instead
        for value in (remap.pending, remap.failure):
            if value != "No":
                return gap_opinion(value, "row remapping") or unknown(f"row remapping: {value}")
        if isinstance(remap.remapped, Gap):
            return gap_opinion(remap.remapped, "remapped rows")
        if remap.remapped >= REMAPPED_ROWS_WARN:
            remedy = "plan to replace the GPU: its spare rows run out"
            return Opinion(Verdict.WARN, f"{remap.remapped:.0f} rows remapped", f"below {REMAPPED_ROWS_WARN}", remedy)
        return None

    return view.each("gpu.row_remap", judge, "no repair of the memory waits")


@dataclass(frozen=True)
class _Owner:
    user: str
    age_s: int | None


def check_busy(view: GpuView) -> list[Finding]:
    """gpu.busy: nobody uses a GPU, at the second look: what ended in between does not count."""
    check = "gpu.busy"
    owners = _owners(view.probe.section(APPS_SECTION))
    blind = _blind(view, check)
    if blind:
        return blind
    if owners is None:
        trouble = view.probe.section(APPS_SECTION).trouble() or "incomplete answer"
        return [view.node(check, unknown("processes on the GPUs cannot be listed", evidence=trouble))]

    def judge(gpu: Gpu) -> Opinion | None:
        compute = _compute(gpu)
        if isinstance(compute, Gap) or isinstance(gpu.used_mib, Gap):
            return unknown("memory in use or processes: not told")
        if not compute and gpu.used_mib <= IDLE_MEMORY_MIB:
            return None
        who = ", ".join(_describe(process, owners) for process in compute[:4]) or "no process visible"
        remedy = "wait, or ask the owner; only then stop it" if compute else _HIDDEN
        return Opinion(Verdict.FAIL, f"{gpu.used_mib:.0f} MiB in use: {who}", "a free GPU", remedy)

    return view.each(check, judge, "no GPU is in use", _again(view))


def _blind(view: GpuView, check: str) -> list[Finding]:
    """UNKNOWN when either look failed, or the second shows other GPUs than the first."""
    silent = view.unanswered(check)
    if silent:
        return silent
    if isinstance(view.again, SmiTrouble):
        words = f"nvidia-smi at the second look: {view.again.failure.value}"
        return [view.node(check, unknown(words, evidence=view.again.evidence))]
    if [gpu.address for gpu in view.again.gpus] != [gpu.address for gpu in view.gpus]:
        return [view.node(check, unknown(f"{AGAIN_SECTION} shows other GPUs than gpu.smi"))]
    return []


def _again(view: GpuView) -> tuple[Gpu, ...]:
    return () if isinstance(view.again, SmiTrouble) else view.again.gpus


def _compute(gpu: Gpu) -> tuple[GpuProcess, ...] | Gap:
    if isinstance(gpu.processes, Gap):
        return gpu.processes
    return tuple(process for process in gpu.processes if process.kind != "G")


def _owners(section: Section) -> dict[int, _Owner] | None:
    """Owner and age by process id; None when the list is not whole."""
    if not section.ok:
        return None
    owners, lines, total = {}, 0, None
    for line in section.output.splitlines():
        words = line.split("\t", 3)
        if words[0] == "app" and len(words) == 4:
            pid = words[3].partition(",")[0]
            if not pid.isdigit():
                return None
            lines += 1
            age = int(words[2]) if words[2].isdigit() else None
            owners[int(pid)] = _Owner(one_line(words[1], 40), age)
        elif words[0] == "apps" and len(words) == 2 and words[1].isdigit():
            total = int(words[1])
    return owners if total == lines else None


def _describe(process: GpuProcess, owners: dict[int, _Owner]) -> str:
    owner = owners.get(process.pid)
    who = f" of {owner.user}" if owner and owner.user else ""
    age = f" since {_duration(owner.age_s)}" if owner and owner.age_s is not None else ""
    return f"{one_line(process.name, 60)} (pid {process.pid}){who}{age}"


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _say(value: object) -> str:
    return value.value if isinstance(value, Gap) else str(value)
