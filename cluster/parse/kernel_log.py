"""What the NVIDIA drivers wrote into the kernel log since boot: Xid (of a GPU), SXid (of an NVSwitch), lost GPUs."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from cluster.parse.nvidia_smi_xml import normal_address
from cluster.probe.section import Section
from cluster.remote_text import one_line


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
MAX_LINE = 2000  # characters; the patterns below take time in the square of it
RECOVERY_XID = 154  # its text says what has to be done
FALLEN_XID = 79


@dataclass(frozen=True)
class Xid:
    """One kind of error of one GPU. address: `0000:0f:00.0`. count: how often. line: the last one."""

    address: str
    code: int
    kind: XidClass | None  # None: it takes an earlier one back
    count: int
    line: str
    pid: int | None = None
    process: str | None = None


@dataclass(frozen=True)
class SwitchXid:
    """One kind of error of one NVSwitch. is_fatal: None when the line does not say."""

    address: str
    code: int
    is_fatal: bool | None
    count: int
    line: str


@dataclass(frozen=True)
class KernelLog:
    """reader: journalctl or dmesg. reaches_boot: whether nothing since boot has been forgotten.

    unread: lines that speak of an Xid in a way that was not understood.
    """

    reader: str
    lines: int
    reaches_boot: bool
    xids: tuple[Xid, ...] = ()
    switch_xids: tuple[SwitchXid, ...] = ()
    unread: tuple[str, ...] = ()


_SXID = re.compile(r"\bSXid \(PCI:([^)]+)\): *(\d{1,6}), *(?:(Non-fatal|Fatal)\b)?", re.IGNORECASE)
_XID = re.compile(r"\bXid \((?:PCI:)?([^)]+)\): *(\d{1,4})\b,?(.*)")
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_PID = re.compile(r"\bpid='?(\d{1,10})")
_NAME = re.compile(r"\bname=([^,<\s][^,]*)")
_CHANGE = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]*)\)", re.IGNORECASE)


def read_kernel_log(section: Section) -> KernelLog | None:
    """The log in `section`; None when it could not be read: no permission, no log, a broken answer."""
    if not section.ok:
        return None
    seen: list[tuple[int, str]] = []
    head: tuple[str, int, bool] | None = None
    for whole in section.output.splitlines():
        line = whole[:MAX_LINE]
        kind, *words = line.split("\t", 2 if line.startswith("seen") else 3)
        if kind == "seen" and len(words) == 2 and words[0].isdigit():
            seen.append((int(words[0]), words[1]))
        elif kind == "log" and len(words) == 3 and words[1].isdigit():
            head = (one_line(words[0], 20), int(words[1]), words[2] == "since boot")
    if head is None or head[1] == 0:
        return None
    return _log(head, seen)


def recovery_class(text: str) -> XidClass | None:
    """What the text of Xid 154 asks for; None when it says that nothing is left to do."""
    change = _CHANGE.search(text)
    asks = (change.group(1) if change else text).lower()
    if change and asks.strip() == "none":
        return None
    return XidClass.REBOOT if "reboot" in asks or not change else XidClass.RESET


def _log(head: tuple[str, int, bool], seen: list[tuple[int, str]]) -> KernelLog:
    xids: list[Xid] = []
    switches: list[SwitchXid] = []
    fallen: list[Xid] = []
    unread: list[str] = []
    for count, line in seen:
        text = one_line(line)
        switch, xid = _SXID.search(line), _XID.search(line)
        if switch:
            severity = (switch.group(3) or "").lower()
            fatal = None if not severity else severity == "fatal"
            switches.append(SwitchXid(_place(switch.group(1)), int(switch.group(2)), fatal, count, text))
        elif xid:
            xids.append(_xid(xid, count, text))
        elif _FALLEN.search(line):
            fallen.append(Xid(normal_address(line) or "?", FALLEN_XID, XidClass.REBOOT, count, text))
        elif re.search(r"\bS?Xid\b", line):
            unread.append(text)
    told = {xid.address for xid in xids if xid.code == FALLEN_XID}
    xids += [xid for xid in fallen if xid.address not in told]
    return KernelLog(*head, tuple(xids), tuple(switches), tuple(unread))


def _xid(found: re.Match[str], count: int, line: str) -> Xid:
    code, rest = int(found.group(2)), found.group(3)
    kind = recovery_class(rest) if code == RECOVERY_XID else XID_CLASSES.get(code, XidClass.UNKNOWN)
    pid, name = _PID.search(rest), _NAME.search(rest)
    return Xid(
        address=_place(found.group(1)),
        code=code,
        kind=kind,
        count=count,
        line=line,
        pid=int(pid.group(1)) if pid else None,
        process=one_line(name.group(1), 60) if name else None,
    )


def _place(text: str) -> str:
    return normal_address(text) or one_line(text, 40)
