"""NVLink: the links by `nvidia-smi nvlink`, the fabric of NVSwitches as GPUs and the daemon for it see it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup, each, known
from cluster.checks.groups.gpu import RESEAT, gpus_by_name, look_at_gpus
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import LSPCI, SMI, Gap, Gpu, needed
from cluster.survey.section import Question, Section, UnreadableError, listed, python_question

_TITLE = re.compile(r"GPU (\d{1,3}): .*")
_LINK = re.compile(r"\s*Link (\d{1,3}): (?:(\d+(?:\.\d+)?) GB/s|<?inactive>?)", re.IGNORECASE)
_ALL_DOWN = re.compile(r"unable to retrieve nvlink information", re.IGNORECASE)
_HEALTH = ("summary", "bandwidth", "route_unhealthy", "route_recovery_in_progress", "incorrect_configuration")
_SOUND = ("Healthy", "Full", "False", "None", Gap.MISSING, Gap.NOT_SUPPORTED)
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
    if Gap.UNREADABLE in (state, status, *health.values()):
        needed(Gap.UNREADABLE)
    if isinstance(state, str) and (state != "Completed" or status not in ("Success", Gap.MISSING)):
        text = f"fabric state {state}" + ("" if isinstance(status, Gap) else f", {status}")
        remedy = "`systemctl restart nvidia-fabricmanager` while no program uses a GPU; see /var/log/fabricmanager.log"
        return check.expecting("Completed, Success").fail(text, remedy)
    odd = ", ".join(f"{name.replace('_', ' ')}: {word}" for name, word in health.items() if word not in _SOUND)
    return check.expecting("a sound fabric").fail(odd, f"see gpu.nvlink and gpu.xid; {RESEAT}") if odd else None


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    """`18 x 26.562 GB/s`, what all nodes must agree on."""
    links = known(read_nvlinks, facts.section(NVLINK))
    if not links:
        return {}
    kinds = {f"{len(gpu)} x {speed:g} GB/s" for gpu in links.values() if gpu for speed in gpu.values() if speed}
    return {"gpu.nvlink": ", ".join(sorted(kinds)) or "none"}


GROUP = CheckGroup(
    "gpu", (check_nvlink, check_fabric), look=look_at_gpus, questions=(LSPCI, SMI, NVLINK, PROCESSES), traits=_traits
)
