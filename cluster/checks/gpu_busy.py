"""Who else uses the GPUs of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster.checks.check import Check, age
from cluster.checks.finding import Finding
from cluster.checks.gpu_view import AGAIN_SECTION, GpuView
from cluster.remote_text import one_line
from cluster.survey.nvidia_smi import Gpu, GpuProcess, SmiTrouble

IDLE_MEMORY_MIB = 15  # what an idle driver holds at most
_OWNER = re.compile(r"owner (\d{1,10}) (\S{1,40}) (\d{1,12})")
_HIDDEN = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"


def check_busy(check: Check, view: GpuView) -> list[Finding]:
    """Nobody else uses a GPU, seen twice; who does, and since when."""
    first, again = view.answer(), view.again  # what ended before the second look does not count
    if isinstance(again, SmiTrouble):
        return [check.unknown(f"nvidia-smi at the second look: {again.failure.value}", evidence=again.evidence)]
    if [gpu.address for gpu in again.gpus] != [gpu.address for gpu in first.gpus]:
        return [check.unknown(f"{AGAIN_SECTION} shows other GPUs than gpu.smi")]
    # Behind the answer of nvidia-smi.
    owners = {found[1]: found for found in map(_OWNER.fullmatch, again.notes) if found}

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


def _describe(process: GpuProcess, owners: Mapping[str, re.Match[str]]) -> str:
    owner = owners.get(str(process.pid))
    whose = f" of {owner[2]} since {age(int(owner[3]))}" if owner else ""
    return f"{one_line(process.name, 60)} (pid {process.pid}){whose}"
