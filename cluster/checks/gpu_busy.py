"""Who else uses the GPUs of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster.checks.check import Check, age
from cluster.checks.finding import Finding
from cluster.checks.gpu_view import AGAIN_SECTION, GpuView
from cluster.remote_text import one_line
from cluster.survey.nvidia_smi import Gpu, GpuProcess, SmiTrouble
from cluster.survey.section import Question

IDLE_MEMORY_MIB = 15  # what an idle driver holds at most
_OWNER = re.compile(r"owner (\d{1,10}) (\S{1,40}) (\d{1,12})")
_HIDDEN = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"

# A second look, seconds after the first: GPUs that are still in use, then owner and age of each process on them. One
# that /proc does not show belongs to another PID namespace.
AGAIN = Question(
    "gpu.again",
    35,
    r"""
command -v nvidia-smi >/dev/null || exit 127
sleep "${BURST_SMI_PAUSE_S:-2}"
answer=$({ nvidia-smi -q -x 2>&1; printf '\n@@ended %s\n' "$?"; } |
    sed -n -e '/<mig_devices>.*<\/mig_devices>/d' -e '/<mig_devices>/,/<\/mig_devices>/d' \
        -e '/<processes *\/>/{p;d;}' -e '/<processes>.*<\/processes>/{p;d;}' -e '/^@@ended /p' \
        -e '/<?xml/p; /<\/\{0,1\}nvidia_smi_log>/p; /<gpu id=/p; /<\/gpu>/p; /<uuid>/p; /<attached_gpus>/p' \
        -e '/<fb_memory_usage>/,/<\/fb_memory_usage>/p' -e '/<processes>/,/<\/processes>/p')
printf '%s\n' "${answer%@@ended *}"
hertz=$(getconf CLK_TCK 2>/dev/null || echo 100)
uptime=
[ -r "$root/proc/uptime" ] && read -r uptime _ <"$root/proc/uptime"
for pid in $(printf '%s\n' "$answer" | sed -n 's/.*<pid>\([0-9][0-9]*\)<\/pid>.*/\1/p' | sort -u); do
    { [ -r "$root/proc/$pid/stat" ] && [ -n "$uptime" ]; } || continue
    read -r stat <"$root/proc/$pid/stat"
    # The command, in brackets, may hold blanks and brackets itself; the start is the 20th word after it.
    start=$(printf '%s\n' "${stat##*) }" | cut -d ' ' -f 20)
    owner=$(ls -ld "$root/proc/$pid" | tr -s ' ' | cut -d ' ' -f 3)
    printf 'owner %s %s %s\n' "$pid" "$owner" "$((${uptime%.*} - start / hertz))"
done
exit "${answer##*@@ended }"
""",
    after="gpu.smi",
)


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
