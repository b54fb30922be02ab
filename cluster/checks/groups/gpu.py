"""GPUs, as `nvidia-smi -q -x` and the PCI bus tell of them: does it answer, is all there, is it healthy and free?
NVLink: the links by `nvidia-smi nvlink`, the fabric of NVSwitches as GPUs and the daemon for it see it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.agent.messages import SLOWDOWNS
from cluster.checks.check import Check, CheckGroup, Finding, Judge, Verdict, age, each, known
from cluster.remote_text import one_line
from cluster.survey.drivers import (
    IDLE_MEMORY_MIB,
    LSPCI,
    SMI,
    Gpu,
    GpuProcess,
    SmiFailure,
    SmiTrouble,
    Unavailable,
    needed,
)
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NotApplicableError, Question, Section, UnreadableError, listed, python_question

REMAPPED_ROWS_WARN = 512  # rows replaced; the spare ones run out
OWNER = re.compile(r"owner (\d{1,10}) (\S{1,40}) (\d{1,12})")  # behind the answer of nvidia-smi
DMESG = "look for NVRM and Xid in `dmesg` on the node"
RESET = "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot"
REBOOT = "drain and reboot the node; if it comes back, reseat or replace the GPU"
REPLACE = "drain the node; look at the board's power cables, run the maker's field diagnostic, replace the board"
RESEAT = "drain the node and power it off and on; if it comes back, reseat or replace the board"
_REMEDIES = {
    SmiFailure.NOT_INSTALLED: "install the NVIDIA driver with its tools, or put nvidia-smi into PATH for ssh commands",
    SmiFailure.NO_ANSWER: f"the driver or a GPU is stuck: {DMESG}, drain the node and reboot it",
    SmiFailure.GPU_LOST: REBOOT,
    SmiFailure.NO_DRIVER: "load the kernel module (`modprobe nvidia`); after a kernel update reinstall the driver",
    SmiFailure.NO_DEVICES: f"the driver finds no GPU: {DMESG}, reboot the node",
    SmiFailure.FAILED: f"run `nvidia-smi -q -x` on the node; {DMESG}; after an update of the driver reboot",
}

# Fields that several drivers name differently: up to driver 525 one counter for SRAM, then two by kind; before Ampere
# counters by single and double bit.
MODEL, ECC_MODE, MIG = "product_name", "ecc_mode/current_ecc", "mig_mode/current_mig"
_VOLATILE = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
_UNCORRECTABLE = tuple(f"ecc_errors/volatile/{name}" for name in (*_VOLATILE, "double_bit/total"))
_POWER = ("gpu_power_readings", "power_readings")
_LIMITS = ("current_power_limit", "enforced_power_limit", "power_limit")
# The GPU as a guest has it (nvmlGpuVirtualizationMode_t: PASSTHROUGH, VGPU); `None` and `Host VGPU` are real machines.
_GUEST_MODES = ("Pass-Through", "VGPU")
_REPAIRS = ("channel_repair_pending", "tpc_repair_pending", "unrepairable_memory")

# What a check says of one GPU; None where all is well.
GpuJudge = Callable[[Check, Gpu], Finding | None]


def gpus_by_name(facts: NodeFacts) -> dict[str, Gpu]:
    """`GPU 0` and on. Raises UnreadableError."""
    return {gpu.device: gpu for gpu in facts.smi_log.gpus}


def of_each_gpu(fine: str, expected: str = "") -> Callable[[GpuJudge], Judge]:
    """Makes a check of all GPUs of what says something of one; see `each`."""

    def decorate(judge: GpuJudge) -> Judge:
        @functools.wraps(judge)
        def check_all(check: Check, facts: NodeFacts) -> list[Finding]:
            return each(check.expecting(expected), gpus_by_name(facts), judge, fine)

        return check_all

    return decorate


def look_at_gpus(facts: NodeFacts) -> NodeFacts:
    """The facts of a node. Raises NotApplicableError for one that has no GPU and needs none."""
    if facts.has_no_gpus:
        raise NotApplicableError("no NVIDIA GPU in this node")
    return facts


def check_nvidia_smi(check: Check, facts: NodeFacts) -> list[Finding]:
    """nvidia-smi answers, whole and in time, and reads every field of every GPU. A driver that hangs here hangs in
    training, too; a GPU that it cannot reach fell off the bus."""
    smi = facts.smi
    if isinstance(smi, SmiTrouble):
        where = check if smi.address is None else check.on(facts.device(smi.address))
        return [where.fail(f"nvidia-smi: {smi.failure.value}", _REMEDIES[smi.failure], smi.evidence)]

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        broken = list(gpu.broken())
        return check.fail(f"{len(broken)} fields cannot be read", REBOOT, "; ".join(broken[:5])) if broken else None

    notes = [note for note in smi.notes if not OWNER.fullmatch(note)]
    warned = [check.warn(f"nvidia-smi warns: {note}", DMESG, note) for note in notes[:1]]
    found = each(check, gpus_by_name(facts), judge, "nvidia-smi answers")
    return [*warned, *(one for one in found if not warned or one.severity is not Verdict.OK)]


def check_count(check: Check, facts: NodeFacts) -> list[Finding]:
    """nvidia-smi, the PCI bus and the configuration (else the other nodes) agree on the number of GPUs."""
    log, expected = facts.smi_log, facts.config.expected.gpus
    if facts.pci is None or facts.pci.total == 0:
        raise UnreadableError("PCI devices cannot be read from sysfs", facts.section(LSPCI).trouble())
    counts = {"nvidia-smi": len(log.gpus), "driver": int(log.number("attached_gpus")), "PCI": len(facts.pci.gpus)}
    wanted = max(counts.values()) if expected is None else expected
    if set(counts.values()) == {wanted} and wanted:
        return [check.ok(str(wanted))]
    observed = ", ".join(f"{count} by {source}" for source, count in counts.items())
    missing = {gpu.pci_path[-1] for gpu in facts.pci.gpus} - {gpu.address for gpu in log.gpus}
    evidence = f"not in nvidia-smi: {', '.join(sorted(missing))}" if missing else ""
    remedy = f"{DMESG}; drain and reboot the node, and check what cluster.expected.gpus says"
    return [check.expecting(f"{wanted} GPUs" if wanted else "at least one GPU").fail(observed, remedy, evidence)]


def check_model(check: Check, facts: NodeFacts) -> list[Finding]:
    """All GPUs are of one model, the expected one. Mixed ones run at the speed of the slowest."""
    models = Counter(known(_model, gpu) for gpu in facts.smi_log.gpus)
    usual = max(models, key=lambda model: models[model], default=None)
    if usual is None or None in models:
        raise UnreadableError("not every GPU tells its model", remedy="compare with `nvidia-smi -q` on the node")
    wanted = facts.config.expected.gpu_model or usual
    # A part of the name is enough for what is expected, but `NVIDIA H20` is no `NVIDIA H200`.
    odd = [f"{count} {one}" for one, count in models.items() if one != usual or wanted.lower() not in usual.lower()]
    if not odd:
        return [check.ok(usual)]
    remedy = "leave the node out, replace the GPU, or correct cluster.expected.gpu_model"
    return [check.expecting(usual if wanted.lower() in usual.lower() else wanted).fail(", ".join(odd), remedy)]


def _model(gpu: Gpu) -> str:
    return gpu.word(MODEL)


@of_each_gpu("MIG is off", expected="MIG Disabled")
def check_mig(check: Check, gpu: Gpu) -> Finding | None:
    """No GPU is cut into instances (MIG): a rank takes a whole GPU."""
    mode = gpu.look(MIG)
    if mode in ("Disabled", Unavailable.NOT_SUPPORTED):
        return None
    return check.fail(f"MIG {needed(mode)}", "switch it off with `nvidia-smi -mig 0` and reset the GPU")


@of_each_gpu("no reset is required", expected="no recovery action")
def check_recovery(check: Check, gpu: Gpu) -> Finding | None:
    """The driver asks for no reset, drain or reboot of a GPU."""
    action = _recovery_action(gpu)
    if action == "None":
        return None
    return check.fail(f"the driver asks for: {action}", REBOOT if "reboot" in action.lower() else RESET)


def _recovery_action(gpu: Gpu) -> str:
    """`None`, or what is asked for. Drivers before 570 had two yes-or-no fields instead, before 525 neither."""
    if gpu.look("gpu_recovery_action") is not Unavailable.MISSING:
        return gpu.word("gpu_recovery_action")
    asks = [gpu.look(f"gpu_reset_status/{name}") for name in ("reset_required", "drain_and_reset_recommended")]
    if "Yes" in asks:
        return "Reset" if asks[0] == "Yes" else "Drain and Reset"
    return (
        "None"
        if asks == ["No", "No"]
        else needed(Unavailable.UNREADABLE if Unavailable.UNREADABLE in asks else Unavailable.NOT_SUPPORTED)
    )


@of_each_gpu("no uncorrectable ECC errors", expected="0")
def check_ecc(check: Check, gpu: Gpu) -> Finding | None:
    """Memory errors are corrected and counted (ECC is on), with none that could not be corrected since the driver
    loaded, after which no result can be trusted, and not so many that the board must be replaced."""
    mode, is_worn = gpu.look(ECC_MODE), gpu.look("ecc_errors/aggregate/sram_threshold_exceeded")
    if is_worn == "Yes":
        remedy = "run the maker's field diagnostic; past the threshold the board is replaced"
        return check.expecting("not exceeded").fail("SRAM error threshold exceeded", remedy)
    if Unavailable.UNREADABLE in (is_worn, mode) or mode is Unavailable.MISSING:
        needed(Unavailable.UNREADABLE)
    if mode == "Disabled":
        remedy = "`nvidia-smi -e 1` and a reset; without ECC a flipped bit goes into the weights unseen"
        return check.expecting("ECC Enabled").warn(f"ECC {mode}", remedy)
    try:
        errors = gpu.total(*_UNCORRECTABLE)
    except NotApplicableError:
        # A GPU that counts errors and does not tell them is not known to be healthy.
        return check.unknown("its errors are not told", RESET) if mode == "Enabled" else check.skip("no ECC")
    return check.fail(f"{errors:.0f} uncorrectable ECC errors since the driver loaded", RESET) if errors else None


@of_each_gpu("no repair of the memory waits")
def check_row_remap(check: Check, gpu: Gpu) -> Finding | None:
    """Repairs of bad memory rows: one that waits needs a reset, one that failed a new board."""
    rows = {name: gpu.look(f"remapped_rows/remapped_row_{name}") for name in ("pending", "failure")}
    if rows["failure"] == "Yes":
        remedy = "replace the GPU: no spare rows are left where they are needed"
        return check.expecting("no failure").fail("a row remapping failed", remedy)
    # Before Ampere pages were retired instead.
    pages = [gpu.look(f"retired_pages/{name}") for name in ("pending_retirement", "pending_blacklist")]
    repairs = "; ".join(
        f"{name.replace('_', ' ')}: Yes" for name in _REPAIRS if gpu.look(f"ecc_errors/{name}") == "Yes"
    )
    if repairs or "Yes" in (rows["pending"], *pages):
        return check.expecting("nothing pending").fail(repairs or "a row remapping waits for a reset", RESET)
    if rows["pending"] is Unavailable.MISSING and pages[0] == "No":
        return None
    if odd := [word for word in map(needed, rows.values()) if word != "No"]:
        return check.unknown(f"row remapping: {odd[0]}")
    remapped = gpu.total(*(f"remapped_rows/remapped_row_{kind}" for kind in ("corr", "unc")))
    if remapped < REMAPPED_ROWS_WARN:
        return None
    remedy = "plan to replace the GPU: its spare rows run out"
    return check.expecting(f"below {REMAPPED_ROWS_WARN}").warn(f"{remapped:.0f} rows remapped", remedy)


@of_each_gpu("nothing slows a GPU down", expected="full clocks")
def check_throttle(check: Check, gpu: Gpu) -> Finding | None:
    """Nothing holds the clocks down: heat, power brake or the power supply."""
    states = {}
    for name in SLOWDOWNS.values():
        end = name.replace(" ", "_")
        # The beginning of the names changed with driver 535.
        states[name] = gpu.look(*(f"clocks_{one}_reasons/clocks_{one}_reason_{end}" for one in ("event", "throttle")))
    if Unavailable.UNREADABLE in states.values() or needed(states["hw slowdown"]) not in ("Active", "Not Active"):
        needed(Unavailable.UNREADABLE)
    active = [name for name, state in states.items() if state == "Active"]
    if not active:
        return None
    # What the hardware does to save itself fails.
    severity = Verdict.FAIL if any(name.startswith("hw") for name in active) else Verdict.WARN
    remedy = "check fans, air flow and power supplies of the node (BMC: sensors, event log)"
    return check.finding(severity, f"slowed down: {', '.join(active)}", remedy)


@of_each_gpu("the default power limit")
def check_power_limit(check: Check, gpu: Gpu) -> Finding | None:
    """Nobody lowered the power limit: ranks of one job wait for the slowest GPU."""
    limit = _power_limit(gpu)
    default = gpu.number(*(f"{parent}/default_power_limit" for parent in _POWER))
    if limit >= default:
        return None
    return check.expecting(f"{default:g} W, the default").warn(
        f"limited to {limit:g} W", f"`nvidia-smi -pl {default:g}`"
    )


def _power_limit(gpu: Gpu) -> float:
    return gpu.number(*(f"{parent}/{name}" for parent in _POWER for name in _LIMITS))


def check_clocks(check: Check, facts: NodeFacts) -> list[Finding]:
    """Nobody set the clocks below the default, and all GPUs can reach the same."""
    gpus, remedy = gpus_by_name(facts), "`nvidia-smi -rac` and `nvidia-smi -rgc` take settings of clocks back"
    highest = max((most for gpu in gpus.values() if (most := known(_highest_clock, gpu)) is not None), default=0.0)

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        most = _highest_clock(gpu)
        if most < highest:
            return check.expecting(f"{highest:g} MHz, as other GPUs here").warn(f"at most {most:g} MHz", remedy)
        ways = [f"{parent}applications_clocks/graphics_clock" for parent in ("", "default_")]
        if any(gpu.look(way) in (Unavailable.MISSING, Unavailable.NOT_SUPPORTED) for way in ways):
            return None  # newer drivers have none
        set_to, default = map(gpu.number, ways)
        check = check.expecting(f"{default:g} MHz, the default")
        return check.warn(f"clocks set to {set_to:g} MHz", remedy) if set_to < default else None

    return each(check, gpus, judge, f"up to {highest:g} MHz")


def _highest_clock(gpu: Gpu) -> float:
    return gpu.number("max_clocks/sm_clock")


def check_pcie(check: Check, facts: NodeFacts) -> list[Finding]:
    """All PCIe lanes of GPU and slot are up, and at full clocks the full generation; fewer lanes slow copies to the
    host. In a virtual machine this warns: the hypervisor chooses what it shows, and nobody can reseat a board."""
    slots = {gpu.index: gpu.slot_width for gpu in facts.gpu_addresses}

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        return _judge_pcie(check, gpu, slots.get(gpu.index))

    return each(check, gpus_by_name(facts), judge, "PCIe links at full width")


def _judge_pcie(check: Check, gpu: Gpu, slot: int | None) -> Finding | None:
    """slot: how many lanes the bridge above the GPU has; None: not told."""
    link = "pci/pci_gpu_link_info"
    width, most = (gpu.number(f"{link}/link_widths/{name}_link_width") for name in ("current", "max"))
    wanted = min(most, slot or most)
    mode = gpu.look("gpu_virtualization_mode/virtualization_mode")
    severity = Verdict.WARN if mode in _GUEST_MODES else Verdict.FAIL
    guest = f", in a virtual machine (nvidia-smi: virtualization mode {mode})" if mode in _GUEST_MODES else ""
    remedy = "compare with other machines of this type; ask the provider" if guest else RESEAT
    if width < wanted:
        return check.expecting(f"{wanted:g} lanes").finding(severity, f"{width:g} PCIe lanes{guest}", remedy)
    if gpu.word("performance_state") != "P0":  # idle links slow down to save power
        return None
    now, best = (gpu.number(f"{link}/pcie_gen/{name}_link_gen") for name in ("current", "max"))
    if now >= best:
        return None
    return check.expecting(f"generation {best:g}").finding(severity, f"PCIe generation {now:g} at P0{guest}", remedy)


def check_busy(check: Check, facts: NodeFacts) -> list[Finding]:
    """Nobody else uses a GPU, seen twice; who does, and since when. A driver may hold some memory by itself."""
    owners = {found[1]: found for found in map(OWNER.fullmatch, facts.smi_log.notes) if found}

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        compute = [process for process in gpu.processes if process.kind != "G"]
        try:
            used_mib = gpu.number("fb_memory_usage/used")
        except NotApplicableError:  # where it shares the memory of the host
            return check.unknown("how much of its memory is in use is not told", "look at `nvidia-smi` on the node")
        if not compute and used_mib <= IDLE_MEMORY_MIB:
            return None
        who = ", ".join(_describe(process, owners) for process in compute[:4]) or "no process visible"
        hidden = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"
        remedy = "wait, or ask the owner; only then stop it" if compute else hidden
        return check.fail(f"{used_mib:.0f} MiB in use: {who}", remedy)

    return each(check.expecting("a free GPU"), gpus_by_name(facts), judge, "no GPU is in use")


def _describe(process: GpuProcess, owners: Mapping[str, re.Match[str]]) -> str:
    owner = owners.get(str(process.pid))
    whose = f" of {owner[2]} since {age(int(owner[3]))}" if owner else ""
    return f"{one_line(process.name, 60)} (pid {process.pid}){whose}"


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """What all nodes must have in common, where the configuration does not say what is right.

    A node without GPUs has the count 0: among others it stands out.
    """
    if facts.has_no_gpus:
        return {"gpu.count": "0"}
    log, expected = facts.smi_log, facts.config.expected
    if not log.gpus:
        return {}
    values = {name: known(_common(read), log.gpus) for name, read in _TRAITS.items()}
    values |= {"gpu.count": str(len(log.gpus)), "gpu.driver": known(log.word, "driver_version")}
    said = {"gpu.count": expected.gpus, "gpu.model": expected.gpu_model}
    return {name: told for name, told in values.items() if said.get(name) is None}


_TRAITS: Mapping[str, Callable[[Gpu], str]] = {
    "gpu.model": _model,
    "gpu.power_limit": lambda gpu: f"{_power_limit(gpu):g} W",
    "gpu.clocks": lambda gpu: f"up to {_highest_clock(gpu):g} MHz",
    "gpu.pcie": lambda gpu: f"x{gpu.number('pci/pci_gpu_link_info/link_widths/current_link_width'):g}",
}


def _common(read: Callable[[Gpu], str]) -> Callable[[Iterable[Gpu]], str]:
    """What GPUs say, in one word."""
    return lambda gpus: ", ".join(sorted({read(gpu) for gpu in gpus}))


# --- NVLink -----------------------------------------------------------------------------------------------------------


_TITLE = re.compile(r"GPU (\d{1,3}): .*")
_LINK = re.compile(r"\s*Link (\d{1,3}): (?:(\d+(?:\.\d+)?) GB/s|<?inactive>?)", re.IGNORECASE)
_ALL_DOWN = re.compile(r"unable to retrieve nvlink information", re.IGNORECASE)
_HEALTH = ("summary", "bandwidth", "route_unhealthy", "route_recovery_in_progress", "incorrect_configuration")
_SOUND = ("Healthy", "Full", "False", "None", Unavailable.MISSING, Unavailable.NOT_SUPPORTED)
_MANAGER = "nv-fabricmanager"[:15]  # what the kernel keeps of the name
_START = (
    "`systemctl enable --now nvidia-fabricmanager`, of the driver's very version: without it no CUDA program starts"
)

# link -> GB/s in one direction, None when it is there and down; None for a GPU all of whose links are down.
Links = Mapping[int, float | None]

NVLINK = Question(
    "gpu.nvlink", 20, "command -v nvidia-smi >/dev/null || exit 127\nnvidia-smi nvlink --status", after="gpu.smi"
)
PROCESSES = python_question(
    "gpu.fabric_manager", 10, 'print(json.dumps([tell(file) for file in root.glob("proc/[0-9]*/comm")]))\n'
)


def check_nvlink(check: Check, facts: NodeFacts) -> list[Finding]:
    """Every NVLink is up, as many per GPU as on the others, at the same speed."""
    gpus, links = gpus_by_name(facts), read_nvlinks(facts.section(NVLINK))
    if len(gpus) == 1:
        return [check.skip("one GPU: there is no other to link it with")]
    speeds = Counter(speed for gpu in links.values() for speed in (gpu or {}).values() if speed is not None)
    counts = Counter(len(gpu) for gpu in links.values() if gpu)
    if not any(gpu is None or gpu for gpu in links.values()) and facts.pci is not None and not facts.pci.nvswitches:
        return [check.skip("GPUs without NVLink")]
    usual, speed = (found.most_common(1)[0][0] if found else 0 for found in (counts, speeds))

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        if gpu.index not in links:
            return check.unknown("not in the answer of `nvidia-smi nvlink --status`")
        return _judge_links(check.expecting(f"{usual or 'all'} links up"), links[gpu.index], int(usual), speed)

    return each(check, gpus, judge, f"{usual} NVLinks of {speed} GB/s per GPU")


def _judge_links(check: Check, links: Links | None, wanted: int, speed: float) -> Finding | None:
    remedy = f"see gpu.xid and gpu.fabric; {RESEAT}"
    inactive = [link for link, found in (links or {}).items() if found is None]
    if not links or len(inactive) == len(links):
        return check.fail("no NVLink is up", remedy)
    if inactive:
        return check.fail(f"NVLink {', '.join(map(str, inactive))} inactive", remedy)
    if len(links) != wanted:
        return check.fail(f"{len(links)} NVLinks", remedy)
    slow = ", ".join(f"{link} at {found:g} GB/s" for link, found in links.items() if found != speed)
    return check.expecting(f"{speed} GB/s, as other links here").fail(f"NVLink {slow}", remedy) if slow else None


def read_nvlinks(section: Section) -> Mapping[int, Links | None]:
    """Links by index of the GPU; a GPU without links has none. Raises UnreadableError."""
    if not section.ok:
        raise UnreadableError("NVLinks cannot be read", section.trouble())
    found: dict[int, dict[int, float | None] | None] = {}
    index = -1
    for line in filter(str.strip, section.output.splitlines()):
        title, link = _TITLE.fullmatch(line), _LINK.fullmatch(line)
        links = found.get(index)
        if title:
            index = int(title[1])
            found.setdefault(index, {})
        elif link and links is not None:
            links[int(link[1])] = float(link[2]) if link[2] else None
        elif _ALL_DOWN.search(line) and index in found:
            found[index] = None
        else:
            raise UnreadableError("NVLinks cannot be read", line[:200])
    return found


def check_fabric(check: Check, facts: NodeFacts) -> list[Finding]:
    """GPUs were let into the fabric of NVSwitches and see it sound (from Hopper on), and the daemon that sets it up
    runs; without it CUDA fails."""
    gpus = gpus_by_name(facts)
    if facts.pci is None:
        raise UnreadableError("NVSwitches: PCI devices cannot be read from sysfs")
    switches = facts.pci.nvswitches
    is_told = any(isinstance(gpu.look("fabric/state"), str) for gpu in gpus.values())
    states = each(check, gpus, _judge_fabric, f"{switches} NVSwitches" if switches else "the NVLink fabric is set up")
    if any(not one.severity.is_fine for one in states) or not switches:
        return states if is_told or any(not one.severity.is_fine for one in states) else [check.skip("no NVSwitch")]
    names = facts.section(PROCESSES).read(listed)
    if not names:
        raise UnreadableError("the fabric manager cannot be looked for: no process was seen")
    return states if _MANAGER in names else [check.expecting("running").fail("fabric manager does not run", _START)]


def _judge_fabric(check: Check, gpu: Gpu) -> Finding | None:
    """From Hopper on a GPU says itself whether it was let into the fabric; older ones say N/A or nothing."""
    state, status = gpu.look("fabric/state"), gpu.look("fabric/status")
    health: dict[str, Any] = {name: gpu.look(f"fabric/health/{name}") for name in _HEALTH}
    if Unavailable.UNREADABLE in (state, status, *health.values()):
        needed(Unavailable.UNREADABLE)
    if isinstance(state, str) and (state != "Completed" or status not in ("Success", Unavailable.MISSING)):
        text = f"fabric state {state}" + ("" if isinstance(status, Unavailable) else f", {status}")
        remedy = "`systemctl restart nvidia-fabricmanager` while no program uses a GPU; see /var/log/fabricmanager.log"
        return check.expecting("Completed, Success").fail(text, remedy)
    odd = ", ".join(f"{name.replace('_', ' ')}: {word}" for name, word in health.items() if word not in _SOUND)
    return check.expecting("a sound fabric").fail(odd, f"see gpu.nvlink and gpu.xid; {RESEAT}") if odd else None


def _link_traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """`18 x 26.562 GB/s`, what all nodes must agree on."""
    links = known(read_nvlinks, facts.section(NVLINK))
    if not links:
        return {}
    kinds = {f"{len(gpu)} x {speed:g} GB/s" for gpu in links.values() if gpu for speed in gpu.values() if speed}
    return {"gpu.nvlink": ", ".join(sorted(kinds)) or "none"}


GROUPS = (
    CheckGroup(
        "gpu",
        (
            *(check_nvidia_smi, check_count, check_model, check_mig, check_recovery, check_ecc, check_row_remap),
            *(check_throttle, check_power_limit, check_clocks, check_pcie, check_busy),
        ),
        look=look_at_gpus,
        questions=(LSPCI, SMI),
        traits=_traits,
        compared={"gpu.driver": "The driver's version, the same on all nodes: NCCL between different ones may fail."},
    ),
    CheckGroup(
        "gpu",
        (check_nvlink, check_fabric),
        look=look_at_gpus,
        questions=(LSPCI, SMI, NVLINK, PROCESSES),
        traits=_link_traits,
    ),
)
