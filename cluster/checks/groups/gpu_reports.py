"""What others report of GPUs. The NVIDIA drivers, in the kernel log since boot: Xid (of a GPU), SXid (of an NVSwitch),
lost GPUs. dcgmi of DCGM 3 and 4: its health monitor and its diagnostic of level 1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.checks.check import Check, CheckGroup, Finding, Verdict
from cluster.checks.groups.gpu import REBOOT, REPLACE, RESET, look_at_gpus
from cluster.remote_text import one_line
from cluster.survey.drivers import KERNEL_LOG, LSPCI, SMI, normal_address, read_kernel_log
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NotApplicableError, Question, Section, SectionState, UnreadableError

# Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors), immediate actions:
# RESET_GPU, and the workflows of 48 and 74, which end in one. What the catalogue answers by RESTART_APP or IGNORE is a
# warning. Our own judgement, as the catalogue leaves the action of both empty: 167, PCIE_FATAL_TIMEOUT, is treated as
# 158, GPU_FATAL_TIMEOUT; 169, SEC2_HALT_ERROR, as 62, the halt of another controller of the GPU.
FALLEN_XID, RECOVERY_XID = 79, 154  # the text of the second says what has to be done
RESET_XIDS = frozenset(
    {46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 167, 169},
)
REBOOT_XIDS = frozenset({FALLEN_XID, 151, 168})
# 54, CHECK_MECHANICALS: the board has no auxiliary power. 157, RESOURCE_RETIREMENT_FAILURE: spares are used up. Its
# immediate action is IGNORE (programs may run and meet the same error again), the next one CONTACT_SUPPORT. Our own
# judgement: no GPU for a long run.
REPLACE_XIDS = frozenset({54, 157})
# NVLink 5 (B100, GB200): the text grades the error, and the catalogue answers every "Fatal" and "Link Fatal" by
# RESET_GPU. Where an error that is not fatal needs more than a restart, Xid 154 follows and says so.
NVLINK5_XIDS = frozenset(range(144, 151))
_OTHERS = "the program on it fails, the GPU goes on; watch it when other programs get it, too: see the catalogue of Xid"
_ERROR = re.compile(r"\b(S?Xid) \((?:PCI:)?([^)]+)\): *(\d{1,6})\b,?(.*)")
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
# Status codes of NVIDIA's open kernel modules (nvstatuscodes.h): the driver refuses all work on the GPU until a reset.
_RESET_REQUIRED = re.compile(r"\bNV_ERR_RESET_REQUIRED\b")
# The driver could not set the GPU up: it is not there for any program. The catalogue is of Xids alone and has no action
# for it; that a reboot comes first is our own judgement, as a GPU that is not set up cannot be reset.
_NOT_SET_UP = re.compile(r"RmInitAdapter failed|rm_init_adapter\b.*\bfailed", re.IGNORECASE)
_FATAL = re.compile(r"(?<![\w-])fatal\b", re.IGNORECASE)  # and neither `Nonfatal` nor `Non-fatal`
_CHANGE = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)
_SWITCH_VERDICTS = {"fatal": Verdict.FAIL, "non-fatal": Verdict.WARN}
# Nothing is switched on for it: where no administrator has set watches, there is no report.
HEALTH = Question("gpu.dcgm_health", 15, "command -v dcgmi >/dev/null || exit 127\ndcgmi health -c -j", "gpu.smi")
# Level 1 looks at software and settings, in seconds, and puts no load on a GPU.
DIAG = Question("gpu.dcgm_diag", 40, "command -v dcgmi >/dev/null || exit 127\ndcgmi diag -r 1 -j", "gpu.smi")
_NO_WATCHES = "health watches not enabled"
_NOT_READ = "run `dcgmi health -c -j` and `dcgmi diag -r 1 -j` on the node; does nv-hostengine run (nvidia-dcgm)?"
_VERDICTS = {"healthy": Verdict.OK, "warning": Verdict.WARN, "failure": Verdict.FAIL}
_RESULTS = {"pass": Verdict.OK, "skip": Verdict.SKIP, "warn": Verdict.WARN, "fail": Verdict.FAIL}
# A driver that is set up anew for each program starts slowly, and trains as well as any.
_SLOW_START = "persistence mode"
_LINES = 4

# (verdict, what happened, what to do, the line)
Complaint = tuple[Verdict, str, str, str]


def check_xid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors that the kernel logged since boot: of a GPU (Xid), some need a reset, some a reboot; of an NVSwitch
    (SXid), a fatal one stops all traffic between GPUs of the node."""
    log, check = read_kernel_log(facts.section(KERNEL_LOG)), check.expecting("none since boot")
    by_device: dict[str | None, list[Complaint]] = {}
    for count, line in log.seen:
        for place, complaint in _read(line, count):
            by_device.setdefault(None if place is None else facts.device(place), []).append(complaint)
    found = []
    for device, complaints in by_device.items():
        severity, _, remedy, line = max(complaints, key=lambda one: (one[0].rank, one[2] == REBOOT))
        words = ", ".join(dict.fromkeys(text for _, text, _, _ in complaints[:6]))
        where = check if device is None else check.on(device)
        found.append(where.finding(severity, words, remedy, one_line(line)))
    if found or log.boot:
        return found or [check.ok("none since boot")]
    observed = f"none in {log.total} lines of {log.reader}, but older ones are forgotten"
    return [check.expecting("a log since boot").warn(observed, "keep the journal on disk, or reboot")]


def _read(line: str, count: int) -> list[tuple[str | None, Complaint]]:
    """(PCI address, what is wrong there), if that is a complaint that still stands."""
    error, times = _ERROR.search(line), f" ({count} times)" if count > 1 else ""
    if error is None and _FALLEN.search(line):
        return [(normal_address(line), (Verdict.FAIL, "fallen off the bus", REBOOT, line))]
    if error is None:
        return _read_driver_error(line)
    place, code = normal_address(error[2]) or one_line(error[2], 40), int(error[3])
    if error[1] == "SXid":
        grade = error[4].partition(",")[0].strip().lower()
        text = f"SXid {code}{times}, {grade if grade in _SWITCH_VERDICTS else 'of unknown gravity'}"
        remedy = "watch it" if grade == "non-fatal" else "drain and reboot; if it recurs, replace the board"
        return [(place, (_SWITCH_VERDICTS.get(grade, Verdict.UNKNOWN), text, remedy, line))]
    asks = ""
    if code == RECOVERY_XID:
        change = _CHANGE.search(error[4])
        asks = (change[1] if change else "reboot").strip().lower()
        if asks == "none":
            return []  # it takes an earlier one back
    if code in REBOOT_XIDS or "reboot" in asks:
        return [(place, (Verdict.FAIL, f"Xid {code}{times}", REBOOT, line))]
    if code in REPLACE_XIDS:
        return [(place, (Verdict.FAIL, f"Xid {code}{times}", REPLACE, line))]
    is_fatal = code in NVLINK5_XIDS and _FATAL.search(error[4]) is not None
    text = f"Xid {code}{times}{', fatal' if is_fatal else ''}"
    needs_reset = bool(asks) or is_fatal or code in RESET_XIDS
    return [(place, (Verdict.FAIL, text, RESET, line) if needs_reset else (Verdict.WARN, text, _OTHERS, line))]


def _read_driver_error(line: str) -> list[tuple[str | None, Complaint]]:
    """The complaint of a line without an Xid that could be read; [] when it is none."""
    for pattern, text, remedy in (
        (_NOT_SET_UP, "the driver could not set it up (RmInitAdapter failed)", REBOOT),
        (_RESET_REQUIRED, "the driver asks for a reset (NV_ERR_RESET_REQUIRED)", RESET),
    ):
        if pattern.search(line):
            return [(normal_address(line), (Verdict.FAIL, text, remedy, line))]
    if "Xid" not in line:
        return []
    return [(None, (Verdict.UNKNOWN, "a line about an Xid that was not understood", "look at it in `dmesg`", line))]


def check_dcgm_health(check: Check, facts: NodeFacts) -> list[Finding]:
    """DCGM's health monitor has nothing to say of GPUs and NVSwitches, where it is installed and watches them."""
    section = facts.section(HEALTH)
    if section.state is SectionState.ENDED and _NO_WATCHES in section.output.lower():
        raise NotApplicableError("DCGM watches nothing here: `dcgmi health -s a` switches it on")
    body = _document(section)["body"]
    overall = one_line(str(body["Overall Health"]["value"]), 40)
    verdict, said = _VERDICTS.get(overall.lower()), list(_incidents("", body))
    if not section.ok or verdict is None:
        raise UnreadableError(f"dcgmi: {section.trouble()} overall health {overall!r}", remedy=_NOT_READ)
    if verdict is Verdict.OK and said:
        verdict = Verdict.UNKNOWN  # it says two things
    text = f"{overall}, says DCGM{''.join(f'; {one}' for one in said[:_LINES])}"
    return [check.expecting("Healthy").finding(verdict, text, "see gpu.xid, gpu.ecc and gpu.pcie")]


def _incidents(name: str, part: Any) -> Iterator[str]:
    """What the health monitor says below one name, with the way to it: `GPU 0 PCIe system: ...`."""
    if isinstance(part, dict):
        for text in part.get("overflow") or ():
            yield f"{name}: {one_line(str(text))}"
        for child, below in sorted(part.items()):
            word = "" if child in ("children", "Errors") else one_line(child, 60)
            yield from _incidents(f"{name} {word}".strip(), below)


def check_dcgm_diag(check: Check, facts: NodeFacts) -> list[Finding]:
    """DCGM's quick diagnostic (level 1) passes on every GPU, where it is installed."""
    section = facts.section(DIAG)
    results = [*_results(_document(section))]
    check, found = check.expecting("every test passed"), []
    for severity, name, device, why in dict.fromkeys(results):
        if not severity.is_fine:
            remedy = f"see what it says; `dcgmi diag -r 2` on the idle node looks closer at {device}"
            found.append(check.on(device).finding(severity, f"{name}: {why}" if why else name, remedy))
    passed = {name for severity, name, _, _ in results if severity is Verdict.OK}
    if not found and (not passed or not section.ok):
        raise UnreadableError(f"dcgmi: {len(passed)} tests passed, exit code {section.exit_code}", remedy=_NOT_READ)
    return found or [check.ok(f"{len(passed)} tests of DCGM passed")]


def _results(document: Mapping[str, Any]) -> Iterator[tuple[Verdict, str, str, str]]:
    """(verdict, test, GPUs, why) of every result. DCGM 3 names GPUs by `gpu_ids`, DCGM 4 by `entity_id`."""
    root = document.get("DCGM Diagnostic") or document["DCGM GPU Diagnostic"]
    tests = [test for category in root["test_categories"] for test in category["tests"] if test]
    for test, result in ((one, result) for one in tests for result in one["results"]):
        told, warnings = str(result["status"]), result.get("warnings", result.get("warning")) or []
        severity = _RESULTS.get(told.lower(), Verdict.UNKNOWN)
        listed = warnings if isinstance(warnings, list) else [warnings]
        words = [one_line(str(one["warning"] if isinstance(one, dict) else one)) for one in listed[:_LINES]]
        name, gpus = one_line(str(test["name"]), 60), result.get("gpu_ids", result.get("entity_id"))
        if severity is Verdict.UNKNOWN:
            words.append(f"status {one_line(told, 40)!r}")
        if severity is Verdict.FAIL and all(_SLOW_START in word.lower() for word in words or [name]):
            severity = Verdict.WARN
        yield severity, name, "all GPUs" if gpus is None else f"GPU {one_line(str(gpus), 40)}", "; ".join(words)


class _Document(dict[str, Any]):
    """An answer; what it lacks is an UnreadableError."""

    def __missing__(self, name: str) -> Any:
        raise UnreadableError(f"dcgmi: no {name!r} in the answer", remedy=_NOT_READ)


def _document(section: Section) -> Mapping[str, Any]:
    """The JSON object in the answer; other words may stand before it. Raises UnreadableError and NotApplicableError."""
    if section.tool_missing:
        raise NotApplicableError("dcgmi is not installed")
    begin = section.output.find("{")
    try:
        if section.state is not SectionState.ENDED or begin < 0:
            raise ValueError(section.trouble() or "no JSON")
        return _Document(json.loads(section.output[begin:], object_hook=_Document))
    except (ValueError, RecursionError) as error:
        last = one_line((section.output.strip().splitlines() or [""])[-1])
        raise UnreadableError(f"dcgmi cannot be read: {one_line(str(error))}", last, _NOT_READ) from None


GROUPS = (
    CheckGroup("gpu", (check_xid, check_dcgm_health), look=look_at_gpus, questions=(LSPCI, SMI, KERNEL_LOG, HEALTH)),
    # Apart: what takes seconds is not asked where nobody wants to know it.
    CheckGroup("gpu", (check_dcgm_diag,), look=look_at_gpus, questions=(LSPCI, SMI, DIAG)),
)
