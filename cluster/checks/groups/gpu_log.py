"""What the NVIDIA drivers wrote into the kernel log since boot: Xid (of a GPU), SXid (of an NVSwitch), lost GPUs."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from cluster.checks.finding import Check, Finding, Verdict
from cluster.checks.group import CheckGroup, run_check
from cluster.checks.groups.gpu import look_at_gpus
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.kernel_log import KERNEL_LOG, KernelLog, read_kernel_log
from cluster.survey.nvidia_smi import LSPCI, SMI, normal_address

RECOVERY_XID = 154  # its text says what has to be done
FALLEN_XID = 79


class Gravity(enum.Enum):
    """What an error of a driver asks for, mildest first: (verdict, words, what to do)."""

    RESTART_APP = (
        Verdict.WARN,
        "the program that ran on it fails; the GPU goes on",
        "a program's fault, or a sign of a weak GPU when it comes with different programs: watch it",
    )
    UNKNOWN = (Verdict.WARN, "not in the catalogue", "look the code up in the driver's Xid catalogue")
    RESET = (
        Verdict.FAIL,
        "the GPU has to be reset",
        "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot; that clears this",
    )
    REBOOT = (
        Verdict.FAIL,
        "the node has to be rebooted",
        "drain and reboot the node; if it comes back, reseat or replace the GPU",
    )


_CODES = {
    Gravity.RESTART_APP: (13, 31, 32, 43, 45, 63, 92, 94, 121, 137),
    Gravity.RESET: (46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143),
    Gravity.REBOOT: (79, 151, 168),
}
_GRAVITIES = {code: kind for kind, codes in _CODES.items() for code in codes}
_SWITCH_VERDICTS = {"fatal": Verdict.FAIL, "non-fatal": Verdict.WARN}


@dataclass(frozen=True)
class DriverError:
    """One kind of error of one device. kind: Xid of a GPU, SXid of an NVSwitch. address: `0000:0f:00.0`. rest: what
    the line says behind the code. count: how often. line: the last one."""

    kind: str
    address: str
    code: int
    rest: str
    count: int
    line: str

    def __str__(self) -> str:
        return f"{self.kind} {self.code}{f' ({self.count} times)' if self.count > 1 else ''}"

    @property
    def gravity(self) -> Gravity | None:
        """Of an Xid; None where it takes an earlier one back."""
        if self.code != RECOVERY_XID:
            return _GRAVITIES.get(self.code, Gravity.UNKNOWN)
        change = _CHANGE.search(self.rest)
        asks = (change[1] if change else "reboot").lower()
        if asks.strip() == "none":
            return None
        return Gravity.REBOOT if "reboot" in asks else Gravity.RESET


def check_xid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors (Xid) that the kernel logged for a GPU since boot: some need a reset, some a reboot."""
    log = read_kernel_log(facts.probe)
    by_gpu: dict[str, list[DriverError]] = {}
    for error in read_errors(log, "Xid"):
        by_gpu.setdefault(error.address, []).append(error)
    told = [_judge_gpu(check.on(facts.device(address)), found) for address, found in by_gpu.items()]
    return _or_silence(check, log, "Xid", [finding for finding in told if finding is not None])


def check_sxid(check: Check, facts: NodeFacts) -> list[Finding]:
    """Errors (SXid) of NVSwitches since boot; a fatal one stops all traffic between GPUs of the node."""
    log = read_kernel_log(facts.probe)
    told = []
    for error in read_errors(log, "SXid"):
        grade = error.rest.partition(",")[0].strip().lower()
        severity = _SWITCH_VERDICTS.get(grade, Verdict.UNKNOWN)
        remedy = "watch it" if severity is Verdict.WARN else "drain and reboot; if it recurs, replace the board"
        text = f"{error}, {grade if grade in _SWITCH_VERDICTS else 'of unknown gravity'}"
        told.append(check.on(error.address).expecting("none").finding(severity, text, remedy, error.line))
    return _or_silence(check, log, "SXid", told)


def _judge_gpu(check: Check, errors: list[DriverError]) -> Finding | None:
    """One finding for a GPU, by the worst of its errors; None where nothing is left to do."""
    standing = {error: gravity for error in errors if (gravity := error.gravity) is not None}
    if not standing:
        return None
    worst = max(standing, key=lambda error: list(Gravity).index(standing[error]))
    words = ", ".join(map(str, list(standing)[:6]))
    words += ": fallen off the bus" if worst.code == FALLEN_XID else ""
    name, pid = _NAME.search(worst.rest), _PID.search(worst.rest)
    words += f" (last of {one_line(name[1], 60)}{f', pid {pid[1]}' if pid else ''})" if name else ""
    severity, asks, remedy = standing[worst].value
    return check.expecting("no Xid since boot").finding(severity, words, f"{asks}: {remedy}", worst.line)


def _or_silence(check: Check, log: KernelLog, kind: str, told: list[Finding]) -> list[Finding]:
    """What is not known beside what was found; nothing found is fine, if the log reaches back to the boot."""
    pattern = re.compile(rf"\b{kind}\b")
    for _, line in log.counted:
        if pattern.search(line) and not _ERROR.search(line):
            told.append(check.unknown(f"a line about an {kind} that was not understood", evidence=one_line(line)))
    if told:
        return told
    if log.reaches_boot:
        return [check.ok(f"no {kind} since boot")]
    observed = f"no {kind} in {log.total} lines of {log.reader}, but older ones are forgotten"
    return [check.expecting("a log since boot").warn(observed, "keep the journal on disk, or reboot")]


_ERROR = re.compile(r"\b(S?Xid) \((?:PCI:)?([^)]+)\): *(\d{1,6})\b,?(.*)")
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_PID = re.compile(r"\bpid='?(\d{1,10})")
_NAME = re.compile(r"\bname=([^,<\s][^,]*)")
_CHANGE = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)


def read_errors(log: KernelLog, kind: str) -> list[DriverError]:
    """What the lines of NVIDIA's drivers say: kind Xid or SXid."""
    found, fallen = [], []
    for count, line in log.counted:
        text, error = one_line(line), _ERROR.search(line)
        if error is not None and error[1] == kind:
            place = normal_address(error[2]) or one_line(error[2], 40)
            found.append(DriverError(kind, place, int(error[3]), error[4], count, text))
        elif error is None and kind == "Xid" and _FALLEN.search(line):
            fallen.append(DriverError(kind, normal_address(line) or "?", FALLEN_XID, "", count, text))
    # That a GPU fell off the bus is told by its Xid, too.
    told = {error.address for error in found if error.code == FALLEN_XID}
    return [*found, *(error for error in fallen if error.address not in told)]


def _look(facts: NodeFacts) -> NodeFacts:
    told = run_check(Check(facts.node, ""), check_xid, facts) if facts.has_no_gpus else []
    # The log may remember GPUs that fell off the bus.
    return facts if any(finding.severity is Verdict.FAIL for finding in told) else look_at_gpus(facts)


GROUP = CheckGroup("gpu", (check_xid, check_sxid), look=_look, questions=(LSPCI, SMI, KERNEL_LOG))
