"""How GPUs are connected: PCIe, NVLink (`nvidia-smi nvlink`), NVSwitches and the daemon for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import CheckGroup
from cluster.checks.groups.gpu import each_gpu, look_at_gpus, of_each_gpu
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import LSPCI, SMI, Gap, GapError, Gpu, NvidiaDevice
from cluster.survey.section import Question, Section, UnreadableError
from cluster.survey.sysfs import python_question

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
# What nvidia-smi says of a fabric in which nothing is wrong, whatever is asked.
_SOUND_FABRIC = ("Healthy", "Full", "False", "None")
_PCIE = "pci/pci_gpu_link_info"
_TITLE = re.compile(r"GPU (\d{1,3}): .*")
_LINK = re.compile(r"\s*Link (\d{1,3}): (?:(\d+(?:\.\d+)?) GB/s|<?inactive>?)", re.IGNORECASE)
_ALL_DOWN = re.compile(r"unable to retrieve nvlink information", re.IGNORECASE)

# link -> GB/s in one direction, None when it is there and down; None for a GPU all of whose links are down.
Links = Mapping[int, float | None]

NVLINK = Question(
    "gpu.nvlink",
    20,
    r"""
command -v nvidia-smi >/dev/null || exit 127
nvidia-smi nvlink --status
""",
    after="gpu.smi",
)

FABRIC_MANAGER = python_question(
    "gpu.fabric_manager",
    10,
    r"""
# The kernel keeps 15 characters of a name.
print(json.dumps([tell(file) for file in root.glob("proc/[0-9]*/comm")]))
""",
)


@of_each_gpu("PCIe links at full width")
def check_pcie(check: Check, gpu: Gpu) -> Finding | None:
    """All PCIe lanes are up, and at full clocks the full generation. Fewer lanes slow copies to the host."""
    width, most = (gpu.number(f"{_PCIE}/link_widths/{name}") for name in ("current_link_width", "max_link_width"))
    if width < most:
        return check.expecting(f"{most:g} lanes").fail(f"{width:g} PCIe lanes", _RESEAT)
    state = gpu.look("performance_state")
    if isinstance(state, Gap):
        return check.unknown("performance state: not told")
    if state != "P0":  # idle links slow down to save power
        return None
    now, best = (gpu.number(f"{_PCIE}/pcie_gen/{name}") for name in ("current_link_gen", "max_link_gen"))
    if now < best:
        return check.expecting(f"generation {best:g}").fail(f"PCIe generation {now:g} at P0", _RESEAT)
    return None


def check_nvlink(check: Check, facts: NodeFacts) -> list[Finding]:
    """Every NVLink is up, as many per GPU as on the others, at the same speed."""
    gpus, links = facts.smi_log.gpus, read_nvlinks(facts.section(NVLINK))
    if len(gpus) == 1:
        return [check.skip("one GPU: there is no other to link it with")]
    if links is None:
        why = facts.section(NVLINK).trouble() or "the answer is incomplete or of an unknown form"
        raise UnreadableError("NVLinks cannot be read", why)
    speeds = Counter(speed for gpu in links.values() for speed in (gpu or {}).values() if speed is not None)
    if not _expects_nvlink(facts) and not speeds:
        return [check.skip("GPUs without NVLink")]
    counts = Counter(len(gpu or {}) for gpu in links.values())
    usual, speed = (found.most_common(1)[0][0] if found else 0 for found in (counts, speeds))

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        if gpu.index not in links:
            return check.unknown("not in the answer of `nvidia-smi nvlink --status`")
        model = gpu.look("product_name")
        wanted = NVLINKS_OF_MODEL.get(model, int(usual)) if isinstance(model, str) else int(usual)
        return _judge_links(check, links[gpu.index], wanted, speed)

    return each_gpu(facts, check, judge, f"{usual} NVLinks of {speed} GB/s per GPU", gpus=gpus)


def _judge_links(check: Check, links: Links | None, wanted: int, speed: float) -> Finding | None:
    remedy = f"see gpu.xid and gpu.fabric_manager; {_RESEAT}"
    check = check.expecting(f"{wanted} links up")
    inactive = [link for link, found in (links or {}).items() if found is None]
    if not links or len(inactive) == len(links):
        return check.fail("no NVLink is up", remedy)
    if inactive:
        return check.fail(f"NVLink {', '.join(map(str, inactive))} inactive", remedy)
    if len(links) != wanted:
        return check.fail(f"{len(links)} NVLinks", remedy)
    slow = ", ".join(f"{link} at {found:g} GB/s" for link, found in links.items() if found != speed)
    return check.expecting(f"{speed} GB/s, as other links here").fail(f"NVLink {slow}", remedy) if slow else None


def read_nvlinks(section: Section) -> Mapping[int, Links | None] | None:
    """Links by index of the GPU; None when the answer cannot be believed. A GPU without links has none."""
    if not section.ok:
        return None
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
            return None
    return found


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """`18 x 26.562 GB/s`, what all nodes must agree on."""
    links = read_nvlinks(facts.section(NVLINK))
    if not links:
        return {}
    kinds = {f"{len(gpu)} x {speed:g} GB/s" for gpu in links.values() if gpu for speed in gpu.values() if speed}
    return {"gpu.nvlink": ", ".join(sorted(kinds)) or "none"}


def check_fabric_manager(check: Check, facts: NodeFacts) -> list[Finding]:
    """The daemon that sets up NVSwitches runs; without it CUDA fails."""
    states = each_gpu(facts, check, _judge_fabric, "the NVLink fabric is set up")
    bad = [finding for finding in states if finding.severity in (Verdict.FAIL, Verdict.UNKNOWN)]
    if bad:
        return bad
    if facts.pci is None:
        raise UnreadableError("NVSwitches: PCI devices cannot be read from sysfs")
    if not facts.pci.nvswitches:
        return states if states[0].severity is Verdict.OK else [check.skip("no NVSwitch")]
    return [_judge_manager(check, facts, facts.pci.nvswitches)]


def _judge_fabric(check: Check, gpu: Gpu) -> Finding | None:
    """From Hopper on a GPU says itself whether it was let into the fabric; older ones say N/A or nothing."""
    state, status = gpu.look("fabric/state"), gpu.look("fabric/status")
    if Gap.UNREADABLE in (state, status):
        raise GapError(Gap.UNREADABLE)
    if isinstance(state, Gap):
        raise GapError(Gap.NOT_SUPPORTED)
    if state == "Completed" and status in ("Success", Gap.MISSING):
        return _judge_fabric_health(check, gpu)
    text = f"fabric state {state}" + ("" if isinstance(status, Gap) else f", {status}")
    remedy = "`systemctl restart nvidia-fabricmanager` while no program uses a GPU; see /var/log/fabricmanager.log"
    return check.expecting("Completed, Success").fail(text, remedy)


def _judge_fabric_health(check: Check, gpu: Gpu) -> Finding | None:
    """What newer drivers know of the GPU's links into the fabric."""
    fields = ("summary", "bandwidth", "route_unhealthy", "route_recovery_in_progress", "incorrect_configuration")
    told = {name: gpu.look(f"fabric/health/{name}") for name in fields}
    if Gap.UNREADABLE in told.values():
        raise GapError(Gap.UNREADABLE)
    odd = {name: word for name, word in told.items() if isinstance(word, str) and word not in _SOUND_FABRIC}
    if not odd:
        return None
    text = ", ".join(f"{name.replace('_', ' ')}: {word}" for name, word in odd.items())
    return check.expecting("a sound fabric").fail(f"NVLink fabric: {text}", f"see gpu.nvlink and gpu.xid; {_RESEAT}")


def _judge_manager(check: Check, facts: NodeFacts, switches: tuple[NvidiaDevice, ...]) -> Finding:
    """It ends by itself when its version is not the driver's. Raises UnreadableError without a list of processes."""
    names = facts.section(FABRIC_MANAGER).document()
    if not isinstance(names, list) or not names:
        raise UnreadableError("the fabric manager cannot be looked for: no process was seen")
    if "nv-fabricmanage" in names:
        return check.ok(f"fabric manager runs, {len(switches)} NVSwitches")
    remedy = (
        "`systemctl enable --now nvidia-fabricmanager`, of the driver's very version: without it no CUDA program starts"
    )
    return check.expecting(f"running, for {len(switches)} NVSwitches").fail("fabric manager does not run", remedy)


def _expects_nvlink(facts: NodeFacts) -> bool:
    """Whether there must be NVLinks: NVSwitches are there, or boards that come with them."""
    switches = facts.pci is None or bool(facts.pci.nvswitches)
    return switches or any(gpu.look("product_name") in NVLINKS_OF_MODEL for gpu in facts.gpus)


GROUP = CheckGroup(
    "gpu",
    (check_pcie, check_nvlink, check_fabric_manager),
    look=look_at_gpus,
    questions=(LSPCI, SMI, NVLINK, FABRIC_MANAGER),
    traits=_traits,
)
