"""What the drivers complained about in the kernel log since boot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import GpuView, Opinion, unknown
from cluster.parse.kernel_log import FALLEN_XID, KernelLog, Xid, XidClass, read_kernel_log

KERNEL_SECTION = "gpu.kernel"
_ALLOW = "let this user read the kernel log (group adm or systemd-journal, or sysctl kernel.dmesg_restrict=0)"
_SEVERITIES = {
    XidClass.RESTART_APP: Verdict.WARN,
    XidClass.UNKNOWN: Verdict.WARN,
    XidClass.RESET: Verdict.FAIL,
    XidClass.REBOOT: Verdict.FAIL,
}
_REMEDIES = {
    XidClass.RESTART_APP: "a program's fault, or a sign of a weak GPU when it comes with different programs: watch it",
    XidClass.UNKNOWN: "look the code up in the driver's Xid catalogue",
    XidClass.RESET: "drain the node and reset the GPU (`nvidia-smi --gpu-reset -i N`) or reboot; that clears this",
    XidClass.REBOOT: "drain and reboot the node; if it comes back, reseat or replace the GPU",
}


def check_xid(view: GpuView) -> list[Finding]:
    """gpu.xid: no error of a GPU since boot that needs a reset or a reboot. One finding per GPU, by its worst."""
    log = read_kernel_log(view.probe.section(KERNEL_SECTION))
    if log is None:
        return [_unread(view, "gpu.xid")]
    standing = [xid for xid in log.xids if xid.kind is not None]
    findings = [_xid_finding(view, address, found) for address, found in _by_address(standing).items()]
    unread = [
        view.node("gpu.xid", unknown("a line about an Xid that was not understood", evidence=line))
        for line in log.unread
        if "SXid" not in line
    ]
    return [*findings, *unread] or [_silence(view, "gpu.xid", log, "Xid")]


def check_sxid(view: GpuView) -> list[Finding]:
    """gpu.sxid: no error of an NVSwitch since boot; a fatal one stops traffic until the node is reset."""
    log = read_kernel_log(view.probe.section(KERNEL_SECTION))
    if log is None:
        return [_unread(view, "gpu.sxid")]
    findings = []
    for xid in log.switch_xids:
        severity = {True: Verdict.FAIL, False: Verdict.WARN, None: Verdict.UNKNOWN}[xid.is_fatal]
        grade = {True: "fatal", False: "not fatal", None: "of unknown gravity"}[xid.is_fatal]
        remedy = "watch it" if xid.is_fatal is False else "drain and reboot the node; if it recurs, replace the board"
        observed = f"SXid {xid.code}, {grade}{_times(xid.count)}"
        findings.append(view.node("gpu.sxid", Opinion(severity, observed, "none", remedy, xid.line), xid.address))
    unread = [
        view.node("gpu.sxid", unknown("a line about an SXid that was not understood", evidence=line))
        for line in log.unread
        if "SXid" in line
    ]
    return [*findings, *unread] or [_silence(view, "gpu.sxid", log, "SXid")]


def _xid_finding(view: GpuView, address: str, found: list[Xid]) -> Finding:
    order = list(XidClass)
    worst = max(found, key=lambda xid: order.index(xid.kind or XidClass.UNKNOWN))
    kind = worst.kind or XidClass.UNKNOWN
    words = ", ".join(f"Xid {xid.code}{_times(xid.count)}" for xid in found[:6])
    if worst.code == FALLEN_XID:
        words += ": fallen off the bus"
    if worst.process:
        words += f" (last of {worst.process}{f', pid {worst.pid}' if worst.pid else ''})"
    opinion = Opinion(_SEVERITIES[kind], words, "no Xid since boot", f"{kind.value}: {_REMEDIES[kind]}", worst.line)
    return view.node("gpu.xid", opinion, view.device(address))


def _by_address(xids: Iterable[Xid]) -> Mapping[str, list[Xid]]:
    groups: dict[str, list[Xid]] = {}
    for xid in xids:
        groups.setdefault(xid.address, []).append(xid)
    return groups


def _silence(view: GpuView, check: str, log: KernelLog, what: str) -> Finding:
    """Nothing was found: fine, if the log reaches back to the boot."""
    if log.reaches_boot:
        return view.node(check, Opinion(Verdict.OK, f"no {what} since boot"))
    observed = f"no {what} in {log.lines} lines of {log.reader}, but older ones are forgotten"
    return view.node(check, Opinion(Verdict.WARN, observed, "a log since boot", "keep the journal on disk, or reboot"))


def _unread(view: GpuView, check: str) -> Finding:
    section = view.probe.section(KERNEL_SECTION)
    said = section.output.strip().splitlines()
    evidence = said[-1][:200] if said else section.trouble()
    return view.node(check, unknown("the kernel log cannot be read", evidence=evidence, remedy=_ALLOW))


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""
