"""What `nvidia-smi -q -x` and the PCI bus tell about GPUs: does it answer, is all there, is it healthy and fast?"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from cluster.agent.messages import SLOWDOWNS
from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import AbsentError, CheckGroup, Judge
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import LSPCI, SMI, Gap, GapError, Gpu, SmiFailure, SmiLog

REMAPPED_ROWS_WARN = 512  # rows replaced; the spare ones run out
_DMESG = "look for NVRM and Xid in `dmesg` on the node"
_RESET = "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot"
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

# Fields that several drivers name differently: up to driver 525 one counter for SRAM, then two by kind; before Ampere
# counters by single and double bit.
MODEL, ECC_MODE, MIG = "product_name", "ecc_mode/current_ecc", "mig_mode/current_mig"
_SRAM = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
_VOLATILE = (*(f"ecc_errors/volatile/{name}" for name in (*_SRAM, "dram_uncorrectable")),)
_UNCORRECTABLE = (*_VOLATILE, "ecc_errors/volatile/double_bit/total")
_POWER = ("gpu_power_readings", "power_readings")
_LIMITS = ("current_power_limit", "enforced_power_limit", "power_limit")
_POWER_LIMIT = tuple(f"{parent}/{name}" for parent in _POWER for name in _LIMITS)
_POWER_DEFAULT = tuple(f"{parent}/default_power_limit" for parent in _POWER)
_SM_MAX, _MEMORY_MAX = "max_clocks/sm_clock", "max_clocks/mem_clock"

# What a check says of one GPU; None where all is well.
GpuJudge = Callable[[Check, Gpu], Finding | None]


def each_gpu(
    facts: NodeFacts,
    check: Check,
    judge: GpuJudge,
    fine: str,
    *,
    gpus: Iterable[Gpu] | None = None,
    is_optional: bool = True,
) -> list[Finding]:
    """A finding for every GPU that `judge` says something of; one OK with `fine` when it says nothing at all.

    A field that is not there makes a GPU UNKNOWN, or SKIP where the GPU does not have it and `is_optional`.
    """
    listed = facts.smi_log.gpus if gpus is None else tuple(gpus)
    if not listed:
        return [check.unknown("nvidia-smi lists no GPU")]
    told = [_judge(check.on(gpu.device), gpu, judge, is_optional) for gpu in listed]
    return [finding for finding in told if finding is not None] or [check.ok(fine)]


def look_at_gpus(facts: NodeFacts) -> NodeFacts:
    """The facts of a node. Raises AbsentError for one that has no GPU and needs none."""
    if facts.has_no_gpus:
        raise AbsentError("no NVIDIA GPU in this node")
    return facts


def _judge(check: Check, gpu: Gpu, judge: GpuJudge, is_optional: bool) -> Finding | None:
    try:
        return judge(check, gpu)
    except GapError as error:
        if error.gap is Gap.NOT_SUPPORTED and is_optional:
            return check.skip("not supported by this GPU")
        return check.unknown(error.gap.value, "compare with `nvidia-smi -q` on the node")


def of_each_gpu(fine: str, expected: str = "") -> Callable[[GpuJudge], Judge]:
    """Makes a check of all GPUs of what says something of one; see `each_gpu`."""

    def decorate(judge: GpuJudge) -> Judge:
        @functools.wraps(judge)
        def check_all(check: Check, facts: NodeFacts) -> list[Finding]:
            return each_gpu(facts, check.expecting(expected), judge, fine)

        return check_all

    return decorate


def spread(values: Iterable[object]) -> str:
    """The different values in order, for one line: `8` or `8, 16`."""
    return ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values}))


def check_nvidia_smi(check: Check, facts: NodeFacts) -> list[Finding]:
    """nvidia-smi answers, whole and in time. A driver that hangs here hangs in training, too."""
    if isinstance(facts.smi, SmiLog):
        if not facts.smi.notes:
            return [check.ok("nvidia-smi answers")]
        note = facts.smi.notes[0]
        return [check.expecting("no warnings").warn(f"nvidia-smi warns: {note}", _DMESG, note)]
    trouble = facts.smi
    # A lost GPU is the cause, and a finding of its own; what nvidia-smi could say about the others stays unknown.
    severity = Verdict.UNKNOWN if trouble.failure is SmiFailure.GPU_LOST else Verdict.FAIL
    observed, remedy = f"nvidia-smi: {trouble.failure.value}", _REMEDIES[trouble.failure]
    return [check.expecting("an answer").finding(severity, observed, remedy, trouble.evidence)]


def check_lost(check: Check, facts: NodeFacts) -> list[Finding]:
    """Every GPU can be reached by the driver. One that fell off the bus needs a reboot, if that helps."""
    remedy = "drain and reboot the node; if it comes back, reseat or replace the GPU"
    if not isinstance(facts.smi, SmiLog) and facts.smi.failure is SmiFailure.GPU_LOST:
        place = facts.smi.address
        where = check.on(facts.device(place)) if place is not None else check
        text = f"the driver cannot reach the GPU{f' at {place}' if place else ''}"
        return [where.fail(text, remedy, facts.smi.evidence)]

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        broken = list(gpu.broken())
        if not broken:
            return None
        return check.fail(f"{len(broken)} fields cannot be read", remedy, "; ".join(broken[:5]))

    return each_gpu(facts, check.expecting("every field readable"), judge, "the driver reaches every GPU")


def check_count(check: Check, facts: NodeFacts) -> list[Finding]:
    """nvidia-smi, the PCI bus and the configuration (else the other nodes) agree on the number of GPUs."""
    log = facts.smi_log
    try:
        counts = {"nvidia-smi": len(log.gpus), "driver": int(log.number("attached_gpus"))}
    except GapError:
        return [check.unknown("nvidia-smi does not say how many GPUs are attached")]
    if facts.pci is None or facts.pci.total == 0:
        trouble = facts.section(LSPCI).trouble()
        return [check.unknown("PCI devices cannot be read from sysfs", evidence=trouble)]
    counts["PCI"] = len(facts.pci.gpus)
    expected = facts.config.expected.gpus
    wanted = max(counts.values()) if expected is None else expected
    if set(counts.values()) == {wanted} and wanted:
        return [check.ok(str(wanted))]
    observed = ", ".join(f"{count} by {source}" for source, count in counts.items())
    seen = {gpu.address for gpu in log.gpus}
    missing = [gpu.address for gpu in facts.pci.gpus if gpu.address not in seen]
    evidence = f"not in nvidia-smi: {', '.join(missing)}" if missing else ""
    remedy = f"{_DMESG}; drain and reboot the node, and check what cluster.expected.gpus says"
    return [check.expecting(f"{wanted} GPUs" if wanted else "at least one GPU").fail(observed, remedy, evidence)]


def check_model(check: Check, facts: NodeFacts) -> list[Finding]:
    """All GPUs are of one model, the expected one. Mixed ones run at the speed of the slowest."""
    expected = facts.config.expected.gpu_model
    known = Counter(model for gpu in facts.gpus if isinstance(model := gpu.look(MODEL), str))
    usual = known.most_common(1)[0][0] if known else ""

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        model = gpu.word(MODEL)
        if expected is not None and expected.lower() not in model.lower():
            remedy = "take the node out of the list, or correct cluster.expected.gpu_model"
            return check.expecting(f"model {expected}").fail(f"model {model}", remedy)
        if model != usual:
            remedy = "replace the GPU: ranks of one job wait for the slowest"
            return check.expecting(f"model {usual}, as most GPUs of the node").fail(f"model {model}", remedy)
        return None

    return each_gpu(facts, check, judge, f"model {spread(known)}", is_optional=False)


def check_driver(check: Check, facts: NodeFacts) -> list[Finding]:
    """The driver's version is known; nodes are compared by it. NCCL between different ones may fail."""
    driver = facts.smi_log.look("driver_version")
    if isinstance(driver, Gap):
        return [check.unknown(f"driver version: {driver.value}")]
    return [check.ok(f"driver {driver}")]


def check_mig(check: Check, facts: NodeFacts) -> list[Finding]:
    """No GPU is cut into instances (MIG): a rank takes a whole GPU."""
    remedy = "switch it off with `nvidia-smi -mig 0` and reset the GPU"
    is_uniform = len({gpu.look(MIG) for gpu in facts.gpus}) == 1

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        if gpu.look(MIG) is Gap.NOT_SUPPORTED:
            return None  # not MIG at all: a whole GPU, too
        mode, pending = gpu.word(MIG), gpu.look("mig_mode/pending_mig")
        if mode != "Disabled":
            check = check.expecting("MIG Disabled on every GPU")
            return check.warn(f"MIG {mode}", remedy) if is_uniform else check.fail(f"MIG {mode}", remedy)
        if pending not in (mode, Gap.NOT_SUPPORTED, Gap.MISSING):
            text = f"MIG will be {gpu.word('mig_mode/pending_mig')} after a reset"
            return check.expecting("MIG Disabled").warn(text, remedy)
        return None

    return each_gpu(facts, check, judge, "MIG is off")


@of_each_gpu("no reset is required", expected="no recovery action")
def check_recovery(check: Check, gpu: Gpu) -> Finding | None:
    """The driver asks for no reset, drain or reboot of a GPU."""
    action = _recovery_action(gpu)
    if action == "None":
        return None
    remedy = "drain and reboot the node" if "reboot" in action.lower() else _RESET
    return check.fail(f"the driver asks for: {action}", remedy)


def _recovery_action(gpu: Gpu) -> str:
    """`None`, or what is asked for. Drivers before 570 had two yes-or-no fields instead, before 525 neither."""
    if gpu.look("gpu_recovery_action") is not Gap.MISSING:
        return gpu.word("gpu_recovery_action")
    asks = [gpu.look(f"gpu_reset_status/{name}") for name in ("reset_required", "drain_and_reset_recommended")]
    if "Yes" in asks:
        return "Reset" if asks[0] == "Yes" else "Drain and Reset"
    if asks == ["No", "No"]:
        return "None"
    raise GapError(Gap.UNREADABLE if Gap.UNREADABLE in asks else Gap.NOT_SUPPORTED)


@of_each_gpu("ECC is on", expected="ECC Enabled")
def check_ecc_mode(check: Check, gpu: Gpu) -> Finding | None:
    """Memory errors are corrected and counted (ECC is on), and no change of that waits for a reboot."""
    remedy = "`nvidia-smi -e 1` and a reset; without ECC a flipped bit goes into the weights unseen"
    mode, pending = gpu.word(ECC_MODE), gpu.look("ecc_mode/pending_ecc")
    if mode != "Enabled":
        return check.warn(f"ECC {mode}", remedy)
    if pending not in ("Enabled", Gap.NOT_SUPPORTED, Gap.MISSING):
        return check.warn(f"ECC pending: {gpu.word('ecc_mode/pending_ecc')}", remedy)
    return None


@of_each_gpu("no uncorrectable ECC errors", expected="0")
def check_ecc(check: Check, gpu: Gpu) -> Finding | None:
    """No uncorrectable memory error since the driver loaded, after which no result can be trusted, and not so many in
    the caches over the life of the board that it must be replaced."""
    is_worn = gpu.look("ecc_errors/aggregate/sram_threshold_exceeded")
    if is_worn == "Yes":
        remedy = "run the maker's field diagnostic; past the threshold the board is replaced"
        return check.expecting("not exceeded").fail("SRAM error threshold exceeded", remedy)
    if is_worn is Gap.UNREADABLE:
        raise GapError(Gap.UNREADABLE)
    try:
        errors = gpu.total(*_UNCORRECTABLE)
    except GapError as error:
        # A GPU that counts errors and does not tell them is not known to be healthy.
        is_hidden = error.gap is Gap.NOT_SUPPORTED and gpu.look(ECC_MODE) == "Enabled"
        raise GapError(Gap.UNREADABLE if is_hidden else error.gap) from error
    return check.fail(f"{errors:.0f} uncorrectable ECC errors since the driver loaded", _RESET) if errors else None


@of_each_gpu("no repair of the memory waits")
def check_row_remap(check: Check, gpu: Gpu) -> Finding | None:
    """Repairs of bad memory rows: one that waits needs a reset, one that failed a new board."""
    repairs = ("channel_repair_pending", "tpc_repair_pending", "unrepairable_memory")
    rows = {name: gpu.look(f"remapped_rows/remapped_row_{name}") for name in ("pending", "failure")}
    if rows["failure"] == "Yes":
        remedy = "replace the GPU: no spare rows are left where they are needed"
        return check.expecting("no failure").fail("a row remapping failed", remedy)
    # Before Ampere pages were retired instead.
    pages = [gpu.look(f"retired_pages/{name}") for name in ("pending_retirement", "pending_blacklist")]
    open_repairs = [name for name in repairs if gpu.look(f"ecc_errors/{name}") == "Yes"]
    if open_repairs or "Yes" in (rows["pending"], *pages):
        words = "; ".join(f"{name.replace('_', ' ')}: Yes" for name in open_repairs)
        check = check.expecting("nothing pending")
        return check.fail(words or "a row remapping waits for a reset", _RESET)
    if rows["pending"] is Gap.MISSING and pages[0] == "No":
        return None
    for word in rows.values():
        if isinstance(word, Gap):
            raise GapError(word)
        if word != "No":
            return check.unknown(f"row remapping: {word}")
    remapped = gpu.total(*(f"remapped_rows/remapped_row_{kind}" for kind in ("corr", "unc")))
    if remapped < REMAPPED_ROWS_WARN:
        return None
    remedy = "plan to replace the GPU: its spare rows run out"
    return check.expecting(f"below {REMAPPED_ROWS_WARN}").warn(f"{remapped:.0f} rows remapped", remedy)


@of_each_gpu("nothing slows a GPU down", expected="full clocks")
def check_throttle(check: Check, gpu: Gpu) -> Finding | None:
    """Nothing holds the clocks down: heat, power brake or the power supply."""
    active = _slowdowns(gpu)
    if not active:
        return None
    # What the hardware does to save itself fails.
    severity = Verdict.FAIL if any(name.startswith("hw") for name in active) else Verdict.WARN
    remedy = "check fans, air flow and power supplies of the node (BMC: sensors, event log)"
    return check.finding(severity, f"slowed down: {', '.join(active)}", remedy)


def _slowdowns(gpu: Gpu) -> list[str]:
    """Those of SLOWDOWNS that are active. Raises GapError."""
    states = {}
    for name in SLOWDOWNS.values():
        end = name.replace(" ", "_")
        # The beginning of the names changed with driver 535.
        states[name] = gpu.look(*(f"clocks_{one}_reasons/clocks_{one}_reason_{end}" for one in ("event", "throttle")))
    told = states["hw slowdown"]
    if Gap.UNREADABLE in states.values() or told not in ("Active", "Not Active"):
        raise GapError(told if told in (Gap.MISSING, Gap.NOT_SUPPORTED) else Gap.UNREADABLE)
    return [name for name, state in states.items() if state == "Active"]


@of_each_gpu("the default power limit")
def check_power_limit(check: Check, gpu: Gpu) -> Finding | None:
    """Nobody lowered the power limit: ranks of one job wait for the slowest GPU."""
    limit, default = gpu.number(*_POWER_LIMIT), gpu.number(*_POWER_DEFAULT)
    if limit < default:
        check = check.expecting(f"{default:g} W, the default")
        return check.warn(f"limited to {limit:g} W", f"`nvidia-smi -pl {default:g}`")
    return None


def check_clocks(check: Check, facts: NodeFacts) -> list[Finding]:
    """Nobody locked the clocks below the default, and all GPUs can reach the same."""
    remedy = "`nvidia-smi -rac` and `nvidia-smi -rgc` take settings of clocks back"
    reach = set()
    for gpu in facts.gpus:
        with contextlib.suppress(GapError):
            reach.add(gpu.number(_SM_MAX))

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        most, highest = gpu.number(_SM_MAX), max(reach)
        if most < highest:
            return check.expecting(f"{highest:g} MHz, as other GPUs here").warn(f"at most {most:g} MHz", remedy)
        # Newer drivers have no application clocks any more; a value that cannot be read is another matter.
        try:
            set_to = gpu.number("applications_clocks/graphics_clock")
            default = gpu.number("default_applications_clocks/graphics_clock")
        except GapError as error:
            if error.gap is Gap.UNREADABLE:
                raise
            return None
        check = check.expecting(f"{default:g} MHz, the default")
        return check.warn(f"clocks set to {set_to:g} MHz", remedy) if set_to < default else None

    return each_gpu(facts, check, judge, f"up to {spread(reach)} MHz")


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have in common, where the configuration does not say what is right.

    A node without GPUs has the count 0: among others it stands out.
    """
    if facts.has_no_gpus:
        return {"gpu.count": "0"}
    if not isinstance(facts.smi, SmiLog) or not facts.gpus:
        return {}
    driver, expected = facts.smi.look("driver_version"), facts.config.expected
    values = {name: _common(read, facts.gpus) for name, read in _TRAITS.items()}
    values |= {"gpu.count": str(len(facts.gpus)), "gpu.driver": driver if isinstance(driver, str) else None}
    said = {"gpu.count": expected.gpus, "gpu.model": expected.gpu_model}
    return {name: told for name, told in values.items() if said.get(name) is None}


_TRAITS: Mapping[str, Callable[[Gpu], str]] = {
    "gpu.model": lambda gpu: gpu.word(MODEL),
    "gpu.ecc_mode": lambda gpu: gpu.word(ECC_MODE),
    "gpu.mig": lambda gpu: gpu.word(MIG),
    "gpu.power_limit": lambda gpu: f"{gpu.number(*_POWER_LIMIT):g} W",
    "gpu.clocks": lambda gpu: f"{gpu.number(_SM_MAX):g}/{gpu.number(_MEMORY_MAX):g} MHz",
}


def _common(read: Callable[[Gpu], str], gpus: Iterable[Gpu]) -> str | None:
    """The values of all GPUs in one word; None as soon as one is not known."""
    try:
        return spread(read(gpu) for gpu in gpus)
    except GapError:
        return None


GROUP = CheckGroup(
    "gpu",
    (
        *(check_nvidia_smi, check_lost, check_count, check_model, check_driver, check_recovery),
        *(check_ecc_mode, check_ecc, check_row_remap),
        *(check_throttle, check_power_limit, check_clocks, check_mig),
    ),
    look=look_at_gpus,
    questions=(LSPCI, SMI),
    traits=_traits,
)
