"""What the NVIDIA drivers wrote into the kernel log since boot: Xid (of a GPU), SXid (of an NVSwitch), lost GPUs."""

from __future__ import annotations

import re

from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import CheckGroup
from cluster.checks.groups.gpu import REBOOT, RESET, look_at_gpus
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.kernel_log import KERNEL_LOG
from cluster.survey.nvidia_smi import LSPCI, SMI, normal_address

FALLEN_XID, RECOVERY_XID = 79, 154  # the text of the second says what has to be done
RESET_XIDS = frozenset({46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143})
REBOOT_XIDS = frozenset({FALLEN_XID, 151, 168})
_OTHERS = "the program on it fails, the GPU goes on; watch it when other programs get it, too: see the catalogue of Xid"
_ERROR = re.compile(r"\b(S?Xid) \((?:PCI:)?([^)]+)\): *(\d{1,6})\b,?(.*)")
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_CHANGE = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)
_SWITCH_VERDICTS = {"fatal": Verdict.FAIL, "non-fatal": Verdict.WARN}

# (verdict, what happened, what to do, the line)
Complaint = tuple[Verdict, str, str, str]


def check_xid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors that the kernel logged since boot: of a GPU (Xid), some need a reset, some a reboot; of an NVSwitch
    (SXid), a fatal one stops all traffic between GPUs of the node."""
    log, check = facts.kernel_log, check.expecting("none since boot")
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
        is_ours = "Xid" in line
        text = "a line about an Xid that was not understood"
        return [(None, (Verdict.UNKNOWN, text, "look at it in `dmesg`", line))] if is_ours else []
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
    severity, remedy = (Verdict.FAIL, RESET) if asks or code in RESET_XIDS else (Verdict.WARN, _OTHERS)
    return [(place, (severity, f"Xid {code}{times}", remedy, line))]


GROUP = CheckGroup("gpu", (check_xid,), look=look_at_gpus, questions=(LSPCI, SMI, KERNEL_LOG))
