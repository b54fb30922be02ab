"""Whether the GPUs can be used: who else is on them, what NVIDIA's own tool says (dcgmi of DCGM 3 and 4: its health
monitor and its diagnostic of level 1), and CUDA for real inside the image of the run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.checks.finding import Check, Finding, Verdict, age
from cluster.checks.group import CheckGroup
from cluster.checks.groups.gpu import each_gpu, look_at_gpus
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import LSPCI, SMI, Gpu, GpuProcess, SmiTrouble, read_smi
from cluster.survey.section import Question, Section, SectionState, UnreadableError
from engine.config.cluster import ContainerConfig
from engine.config.errors import ConfigError

IDLE_MEMORY_MIB = 15  # what an idle driver holds at most
# A second look, and seconds later a third where something is in use: GPUs that still are, then owner and age of each
# process on them. One that /proc does not show belongs to another PID namespace.
AGAIN = Question(
    "gpu.again",
    35,
    r"""
command -v nvidia-smi >/dev/null || exit 127
look() {
    { nvidia-smi -q -x 2>&1; printf '\n@@ended %s\n' "$?"; } | sed -n \
        -e '/<mig_devices>.*<\/mig_devices>/d' -e '/<mig_devices>/,/<\/mig_devices>/d' \
        -e '/<processes *\/>/{p;d;}' -e '/<processes>.*<\/processes>/{p;d;}' -e '/^@@ended /p' \
        -e '/<?xml/p; /<\/\{0,1\}nvidia_smi_log>/p; /<gpu id=/p; /<\/gpu>/p; /<uuid>/p; /<attached_gpus>/p' \
        -e '/<fb_memory_usage>/,/<\/fb_memory_usage>/p' -e '/<processes>/,/<\/processes>/p'
}
answer=$(look)
if printf '%s\n' "$answer" | grep -Eq '<pid>|<used>(1[6-9]|[2-9][0-9]|[0-9]{3,}) MiB'; then
    sleep "${BURST_SMI_PAUSE_S:-2}"
    answer=$(look)
fi
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
    after=SMI.name,
)
_OWNER = re.compile(r"owner (\d{1,10}) (\S{1,40}) (\d{1,12})")
# Nothing is switched on for it: where no administrator has set watches, there is no report.
DCGM_HEALTH = Question("gpu.dcgm_health", 15, "command -v dcgmi >/dev/null || exit 127\ndcgmi health -c -j", "gpu.smi")
# Level 1 looks at software and settings, in seconds, and puts no load on a GPU.
DCGM_DIAG = Question("gpu.dcgm_diag", 40, "command -v dcgmi >/dev/null || exit 127\ndcgmi diag -r 1 -j", "gpu.smi")
_ABSENT = "dcgmi is not installed"
_NO_WATCHES = "health watches not enabled"
_NOT_READ = "run `{}` on the node; does nv-hostengine run (`systemctl status nvidia-dcgm`)?"
_HEALTH = {"Healthy": Verdict.OK, "Warning": Verdict.WARN, "Failure": Verdict.FAIL}
_RESULTS = {"pass": Verdict.OK, "skip": Verdict.SKIP, "warn": Verdict.WARN, "fail": Verdict.FAIL}
# A driver that is set up anew for each program starts slowly, and trains as well as any.
_SLOW_START = "persistence mode"
_LINES = 4
SMOKE_SECTION = "gpu.smoke"
_SECONDS = 120
_PROGRAM = (
    "import torch; n = torch.cuda.device_count(); "
    "s = [float((torch.ones(256, 256, device=f'cuda:{i}') @ torch.ones(256, 256, device=f'cuda:{i}')).sum()) "
    "for i in range(n)]; assert all(x == 256.0 ** 3 for x in s), s; print('cuda works on', n)"
)


def check_busy(check: Check, facts: NodeFacts) -> list[Finding]:
    """Nobody else uses a GPU, seen twice; who does, and since when."""
    first, again = facts.smi_log, read_smi(facts.section(AGAIN))  # what ended before the second look does not count
    if isinstance(again, SmiTrouble):
        return [check.unknown(f"nvidia-smi at the second look: {again.failure.value}", evidence=again.evidence)]
    if [gpu.address for gpu in again.gpus] != [gpu.address for gpu in first.gpus]:
        return [check.unknown(f"{AGAIN.name} shows other GPUs than {SMI.name}")]
    # Behind the answer of nvidia-smi.
    owners = {found[1]: found for found in map(_OWNER.fullmatch, again.notes) if found}

    def judge(check: Check, gpu: Gpu) -> Finding | None:
        compute = [process for process in gpu.processes if process.kind != "G"]
        used_mib = gpu.number("fb_memory_usage/used")
        if not compute and used_mib <= IDLE_MEMORY_MIB:
            return None
        who = ", ".join(_describe(process, owners) for process in compute[:4]) or "no process visible"
        hidden = "find it with `fuser -v /dev/nvidia*` (containers, other users), else reset the GPU"
        remedy = "wait, or ask the owner; only then stop it" if compute else hidden
        return check.fail(f"{used_mib:.0f} MiB in use: {who}", remedy)

    check = check.expecting("a free GPU")
    return each_gpu(facts, check, judge, "no GPU is in use", gpus=again.gpus, is_optional=False)


def _describe(process: GpuProcess, owners: Mapping[str, re.Match[str]]) -> str:
    owner = owners.get(str(process.pid))
    whose = f" of {owner[2]} since {age(int(owner[3]))}" if owner else ""
    return f"{one_line(process.name, 60)} (pid {process.pid}){whose}"


def check_dcgm_health(check: Check, facts: NodeFacts) -> list[Finding]:
    """DCGM's health monitor has nothing to say of GPUs and NVSwitches, where it is installed and watches them."""
    section = facts.section(DCGM_HEALTH)
    if section.tool_missing:
        return [check.skip(_ABSENT)]
    if section.state is SectionState.ENDED and _NO_WATCHES in section.output.lower():
        return [check.skip("DCGM watches nothing here: `dcgmi health -s a` switches it on")]
    body = _table(_document(section, "dcgmi health -c -j"), "body")
    told = str(_table(body, "Overall Health").get("value", "missing"))
    if not section.ok or told not in _HEALTH:
        why = section.trouble() or f"overall health {one_line(told, 40)!r}"
        raise _unreadable(section, "dcgmi health -c -j", why)
    said = [one_line(text, 200) for name, part in sorted(body.items()) for text in _incidents(name, part)]
    check = check.expecting("Healthy")
    if told == "Healthy" and not said:
        return [check.ok("Healthy, says DCGM")]
    worst = _HEALTH[told] if told != "Healthy" else Verdict.UNKNOWN
    return [check.finding(worst, f"{told}, says DCGM: {'; '.join(said[:_LINES])}", "see gpu.xid, gpu.ecc and gpu.pcie")]


def check_dcgm_diag(check: Check, facts: NodeFacts) -> list[Finding]:
    """DCGM's quick diagnostic (level 1) passes on every GPU, where it is installed."""
    section = facts.section(DCGM_DIAG)
    if section.tool_missing:
        return [check.skip(_ABSENT)]
    results = list(_results(section))
    check, found = check.expecting("every test passed"), []
    for severity in (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN):
        for name, device, why in dict.fromkeys(result[1:] for result in results if result[0] is severity):
            text = f"{name}: {why}" if why else name
            remedy = f"see what it says; `dcgmi diag -r 2` on the idle node looks closer{device and f' at {device}'}"
            found.append(check.on(device or "all GPUs").finding(severity, text, remedy))
    if found:
        return found
    passed = {name for severity, name, _, _ in results if severity is Verdict.OK}
    if not passed or not section.ok:
        raise _unreadable(section, "dcgmi diag -r 1 -j", f"{len(passed)} tests passed, exit code {section.exit_code}")
    return [check.ok(f"{len(passed)} tests of DCGM passed")]


def _results(section: Section) -> Iterator[tuple[Verdict, str, str, str]]:
    """(verdict, test, GPUs or nothing, why) of every result. DCGM 3 names GPUs by `gpu_ids`, DCGM 4 by `entity_id`."""
    document = _document(section, "dcgmi diag -r 1 -j")
    root = document.get("DCGM Diagnostic") or _table(document, "DCGM GPU Diagnostic")
    try:
        for category in root["test_categories"]:
            for test in filter(None, category["tests"]):
                for result in test["results"]:
                    yield _result(str(test["name"]), result)
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(section, "dcgmi diag -r 1 -j", one_line(f"{type(error).__name__}: {error}", 80)) from None


def _result(name: str, result: Mapping[str, Any]) -> tuple[Verdict, str, str, str]:
    told = str(result["status"])
    severity = _RESULTS.get(told.lower(), Verdict.UNKNOWN)
    warnings = result.get("warnings", result.get("warning")) or []
    listed = warnings if isinstance(warnings, list) else [warnings]
    words = [one_line(str(one["warning"] if isinstance(one, dict) else one), 200) for one in listed[:_LINES]]
    why = "; ".join(words) or ("" if severity is not Verdict.UNKNOWN else f"status {one_line(told, 40)!r}")
    if severity is Verdict.FAIL and all(_SLOW_START in word.lower() for word in words or [name]):
        severity = Verdict.WARN
    gpus = result.get("gpu_ids", result.get("entity_id"))
    return severity, one_line(name, 60), "" if gpus is None else f"GPU {one_line(str(gpus), 40)}", why


def _incidents(name: str, part: Any) -> Iterator[str]:
    """What the health monitor says below one name, with the way to it: `GPU 0 PCIe system Warning: ...`."""
    if not isinstance(part, dict):
        return
    for text in part.get("overflow") or ():
        yield f"{name} {part.get('value', '')}: {text}"
    for child, below in sorted(_table(part, "children").items()):
        yield from _incidents(name if child == "Errors" else f"{name} {child}", below)


def _document(section: Section, command: str) -> dict[str, Any]:
    """The JSON object in the answer; other words may stand before it. Raises UnreadableError."""
    if section.state is SectionState.MISSING:
        raise UnreadableError("dcgmi was not asked", remedy="see gpu.nvidia_smi")
    begin = section.output.find("{")
    if section.state is not SectionState.ENDED or begin < 0:
        raise _unreadable(section, command, section.trouble() or "no JSON")
    try:
        document, end = json.JSONDecoder().raw_decode(section.output, begin)
    except (ValueError, RecursionError):
        raise _unreadable(section, command, "no whole JSON") from None
    if section.output[end:].strip():
        raise _unreadable(section, command, "more than one answer")
    return document if isinstance(document, dict) else {}


def _table(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, dict) else {}


def _unreadable(section: Section, command: str, why: str) -> UnreadableError:
    last = section.output.strip().splitlines()[-1:] or [""]
    return UnreadableError(f"`{command}` cannot be read: {why}", one_line(last[0], 200), _NOT_READ.format(command))


def cuda_smoke_question(container: ContainerConfig) -> Question:
    """Multiplies a matrix on every GPU inside the image of the ranks, which must be on the node already.

    Raises ConfigError when they run in none.
    """
    if container.runtime != "docker" or not container.image:
        raise ConfigError("CUDA is tried inside an image: set cluster.container.runtime=docker and .image=NAME:TAG")
    words = [*container.command.split(), "run", "--rm", "--gpus", "all", "--network", "none", "--pull", "never"]
    words += ["--entrypoint", "python", container.image]
    return Question(SMOKE_SECTION, _SECONDS, f"{shlex.join(words)} -c {shlex.quote(_PROGRAM)}")


def check_cuda_smoke(check: Check, facts: NodeFacts) -> list[Finding]:
    """A matrix product on every GPU inside the run image; only with --cuda-smoke."""
    section = facts.probe.sections.get(SMOKE_SECTION)
    if section is None:
        return [check.skip("CUDA was not tried inside an image")]
    last = section.output.strip().splitlines()[-1:] or [""]
    evidence = last[0][:200]
    found = re.fullmatch(r"cuda works on (\d{1,3})", evidence)
    if section.exit_code is None:
        return [check.unknown(section.trouble(), evidence=evidence)]
    if not section.ok or found is None:
        remedy = "run the image by hand on the node: `docker run --rm --gpus all IMAGE nvidia-smi`"
        return [check.expecting("it works").fail(f"CUDA fails in the image: {section.trouble()}", remedy, evidence)]
    if facts.gpus and int(found[1]) != len(facts.gpus):
        remedy = "check the container runtime (nvidia-container-toolkit, CDI) and CUDA_VISIBLE_DEVICES in the image"
        return [check.expecting(f"{len(facts.gpus)} GPUs").fail(f"{found[1]} GPUs in the image", remedy)]
    return [check.ok(evidence)]


# Three: what takes seconds is not asked where nobody wants to know it.
GROUP = CheckGroup("gpu", (check_busy, check_cuda_smoke), look=look_at_gpus, questions=(LSPCI, SMI, AGAIN))
DCGM_MONITOR = CheckGroup("gpu", (check_dcgm_health,), look=look_at_gpus, questions=(LSPCI, SMI, DCGM_HEALTH))
DCGM_DIAGNOSTIC = CheckGroup("gpu", (check_dcgm_diag,), look=look_at_gpus, questions=(LSPCI, SMI, DCGM_DIAG))
