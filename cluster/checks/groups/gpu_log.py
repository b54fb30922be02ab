"""What the NVIDIA drivers wrote into the kernel log since boot: Xid (of a GPU), SXid (of an NVSwitch), lost GPUs."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import CheckGroup, run_check
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.kernel_log import KERNEL_LOG, KernelLog, read_kernel_log
from cluster.survey.nvidia_smi import LSPCI, SMI, normal_address

RECOVERY_XID = 154  # its text says what has to be done
FALLEN_XID = 79


class XidClass(enum.Enum):
    """What a driver's error asks for, mildest first."""

    RESTART_APP = "the program that ran on it fails; the GPU goes on"
    UNKNOWN = "not in the catalogue"
    RESET = "the GPU has to be reset"
    REBOOT = "the node has to be rebooted"


_CODES = {
    XidClass.RESTART_APP: (13, 31, 32, 43, 45, 63, 92, 94, 121, 137),
    XidClass.RESET: (46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143),
    XidClass.REBOOT: (79, 151, 168),
}
XID_CLASSES = {code: kind for kind, codes in _CODES.items() for code in codes}
_ORDER = list(XidClass)
_REMEDIES = {
    XidClass.RESTART_APP: "a program's fault, or a sign of a weak GPU when it comes with different programs: watch it",
    XidClass.UNKNOWN: "look the code up in the driver's Xid catalogue",
    XidClass.RESET: "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot; that clears this",
    XidClass.REBOOT: "drain and reboot the node; if it comes back, reseat or replace the GPU",
}


@dataclass(frozen=True)
class Xid:
    """One kind of error of one GPU. address: `0000:0f:00.0`. count: how often. line: the last one. process: words."""

    address: str
    code: int
    kind: XidClass | None  # None: it takes an earlier one back
    count: int
    line: str
    process: str = ""


@dataclass(frozen=True)
class SwitchXid:
    """One kind of error of one NVSwitch. grade: `fatal`, `non-fatal`, or empty when the line does not say."""

    address: str
    code: int
    grade: str
    count: int
    line: str


@dataclass
class DriverErrors:
    """unread: lines that speak of an Xid in a way that was not understood."""

    xids: list[Xid] = field(default_factory=list)
    switch_xids: list[SwitchXid] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def check_xid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors (Xid) that the kernel logged for a GPU since boot: some need a reset, some a reboot."""
    log = read_kernel_log(facts.probe)
    errors = read_errors(log)
    standing: dict[str, list[Xid]] = {}
    for xid in errors.xids:
        if xid.kind is not None:
            standing.setdefault(xid.address, []).append(xid)
    told = [_judge_gpu(check.on(facts.device(address)), found) for address, found in standing.items()]
    return told + _silence(check, log, "Xid", [line for line in errors.unread if "SXid" not in line], not told)


def check_sxid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors (SXid) of NVSwitches since boot; a fatal one stops all traffic between GPUs of the node."""
    log = read_kernel_log(facts.probe)
    errors = read_errors(log)
    check = check.expecting("none")
    told = []
    for xid in errors.switch_xids:
        severity = {"fatal": Verdict.FAIL, "non-fatal": Verdict.WARN}.get(xid.grade, Verdict.UNKNOWN)
        remedy = "watch it" if severity is Verdict.WARN else "drain and reboot; if it recurs, replace the board"
        text = f"SXid {xid.code}, {xid.grade or 'of unknown gravity'}{_times(xid.count)}"
        told.append(check.on(xid.address).finding(severity, text, remedy, xid.line))
    return told + _silence(check, log, "SXid", [line for line in errors.unread if "SXid" in line], not told)


def _judge_gpu(check: Check, found: list[Xid]) -> Finding:
    """One finding for a GPU, by the worst of its errors."""
    worst = max(found, key=lambda xid: _ORDER.index(xid.kind or XidClass.UNKNOWN))
    kind = worst.kind or XidClass.UNKNOWN
    words = ", ".join(f"Xid {xid.code}{_times(xid.count)}" for xid in found[:6])
    words += ": fallen off the bus" if worst.code == FALLEN_XID else ""
    words += f" (last of {worst.process})" if worst.process else ""
    severity = Verdict.FAIL if kind in (XidClass.RESET, XidClass.REBOOT) else Verdict.WARN
    check = check.expecting("no Xid since boot")
    return check.finding(severity, words, f"{kind.value}: {_REMEDIES[kind]}", worst.line)


def _silence(check: Check, log: KernelLog, what: str, unread: list[str], nothing_found: bool) -> list[Finding]:
    """What is not known beside what was found; nothing found is fine, if the log reaches back to the boot."""
    if unread or not nothing_found:
        return [check.unknown(f"a line about an {what} that was not understood", evidence=line) for line in unread]
    if log.reaches_boot:
        return [check.ok(f"no {what} since boot")]
    observed = f"no {what} in {log.total} lines of {log.reader}, but older ones are forgotten"
    return [check.expecting("a log since boot").warn(observed, "keep the journal on disk, or reboot")]


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


_SXID = re.compile(r"\bSXid \(PCI:([^)]+)\): *(\d{1,6}), *(?:(Non-fatal|Fatal)\b)?", re.IGNORECASE)
_XID = re.compile(r"\bXid \((?:PCI:)?([^)]+)\): *(\d{1,4})\b,?(.*)")
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_PID = re.compile(r"\bpid='?(\d{1,10})")
_NAME = re.compile(r"\bname=([^,<\s][^,]*)")
_CHANGE = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)


def read_errors(log: KernelLog) -> DriverErrors:
    """What the lines of NVIDIA's drivers say."""
    errors = DriverErrors()
    for count, line in log.counted:
        _take(errors, count, line)
    # That a GPU fell off the bus is told by its Xid, too.
    told = {xid.address for xid in errors.xids if xid.code == FALLEN_XID and _XID.search(xid.line)}
    errors.xids = [xid for xid in errors.xids if xid.address not in told or _XID.search(xid.line)]
    return errors


def recovery_class(text: str) -> XidClass | None:
    """What the text of Xid 154 asks for; None when it says that nothing is left to do."""
    change = _CHANGE.search(text)
    asks = (change.group(1) if change else text).lower()
    if change and asks.strip() == "none":
        return None
    return XidClass.REBOOT if "reboot" in asks or not change else XidClass.RESET


def _take(errors: DriverErrors, count: int, line: str) -> None:
    text = one_line(line)
    switch, xid = _SXID.search(line), _XID.search(line)
    if switch:
        place, code, grade = switch.groups()
        errors.switch_xids.append(SwitchXid(_place(place), int(code), (grade or "").lower(), count, text))
    elif xid:
        code, rest = int(xid[2]), xid[3]
        kind = recovery_class(rest) if code == RECOVERY_XID else XID_CLASSES.get(code, XidClass.UNKNOWN)
        name, pid = _NAME.search(rest), _PID.search(rest)
        process = f"{one_line(name[1], 60)}{f', pid {pid[1]}' if pid else ''}" if name else ""
        errors.xids.append(Xid(_place(xid[1]), code, kind, count, text, process))
    elif _FALLEN.search(line):
        errors.xids.append(Xid(normal_address(line) or "?", FALLEN_XID, XidClass.REBOOT, count, text))
    elif re.search(r"\bS?Xid\b", line):
        errors.unread.append(text)


def _place(text: str) -> str:
    return normal_address(text) or one_line(text, 40)


def _look(facts: NodeFacts) -> NodeFacts | Finding | None:
    if not facts.has_no_gpus:
        return facts
    # The log may remember GPUs that fell off the bus.
    told = run_check(Check(facts.node, "gpu.xid"), check_xid, facts)
    return next((finding for finding in told if finding.severity is Verdict.FAIL), None)


GROUP = CheckGroup("gpu", (check_xid, check_sxid), look=_look, questions=(LSPCI, SMI, KERNEL_LOG))
