"""Who else uses the GPUs of a node."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.checks.check import Check, age
from cluster.checks.finding import Finding
from cluster.checks.gpu_view import AGAIN_SECTION, GpuView
from cluster.parse.nvidia_smi import Gpu, GpuProcess, SmiTrouble
from cluster.remote_text import one_line

IDLE_MEMORY_MIB = 15  # what an idle driver holds at most
APPS_SECTION = "gpu.apps"
_HIDDEN = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"


@dataclass(frozen=True)
class _Owner:
    user: str
    age_s: int | None


def check_busy(check: Check, view: GpuView) -> list[Finding]:
    """Nobody else uses a GPU, seen twice; who does, and since when."""
    first, again = view.answer(), view.again  # what ended before the second look does not count
    if isinstance(again, SmiTrouble):
        return [check.unknown(f"nvidia-smi at the second look: {again.failure.value}", evidence=again.evidence)]
    if [gpu.address for gpu in again.gpus] != [gpu.address for gpu in first.gpus]:
        return [check.unknown(f"{AGAIN_SECTION} shows other GPUs than gpu.smi")]
    owners = _read_owners(view)

    def judge(gpu: Gpu, check: Check) -> Finding | None:
        compute = [process for process in gpu.processes if process.kind != "G"]
        used_mib = gpu.number("fb_memory_usage/used")
        if not compute and used_mib <= IDLE_MEMORY_MIB:
            return None
        who = ", ".join(_describe(process, owners) for process in compute[:4]) or "no process visible"
        remedy = "wait, or ask the owner; only then stop it" if compute else _HIDDEN
        return check.fail(f"{used_mib:.0f} MiB in use: {who}", remedy)

    what = "memory in use or processes"
    return view.each(check.expecting("a free GPU"), what, judge, "no GPU is in use", gpus=again.gpus, is_optional=False)


def _read_owners(view: GpuView) -> dict[int, _Owner]:
    """Owner and age by process id. Raises UnreadableError when the list is not whole."""
    rows = [line.split("\t", 3) for line in view.probe.section(APPS_SECTION).output.splitlines()]
    apps = [(row[3].partition(",")[0], row) for row in rows if row[0] == "app" and len(row) == 4]
    told = [row[1:] for row in rows if row[0] == "apps"]
    is_whole = told == [[str(len(apps))]] and all(pid.isdigit() for pid, _ in apps)
    if not view.probe.section(APPS_SECTION).ok or not is_whole:
        raise view.unreadable("processes on the GPUs cannot be listed", APPS_SECTION)
    return {int(pid): _Owner(one_line(row[1], 40), int(row[2]) if row[2].isdigit() else None) for pid, row in apps}


def _describe(process: GpuProcess, owners: dict[int, _Owner]) -> str:
    owner = owners.get(process.pid, _Owner("", None))
    who = f" of {owner.user}" if owner.user else ""
    since = f" since {age(owner.age_s)}" if owner.age_s is not None else ""
    return f"{one_line(process.name, 60)} (pid {process.pid}){who}{since}"
