"""Group ssh: can the node be reached, is its clock right."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cluster.checks.finding import Finding, Verdict
from cluster.checks.selection import REACH
from cluster.errors import SshError, SshFailure
from cluster.probe.section import NodeProbe
from cluster.remote_text import one_line

SKEW_WARN_S = 1.0
SKEW_FAIL_S = 5.0
_QUORUM = 3  # clocks that can outvote ours
_EXPECTED = {
    SshFailure.DNS: "a name with an address",
    SshFailure.REFUSED: "sshd listening",
    SshFailure.UNREACHABLE: "a route to the node",
    SshFailure.TIMEOUT: "an answer within cluster.ssh.connect_timeout_s",
    SshFailure.HOST_KEY_UNKNOWN: "a known host key",
    SshFailure.HOST_KEY_CHANGED: "the known host key",
    SshFailure.AUTH: "a login with one of our keys",
    SshFailure.PROTOCOL: "an SSH server",
    SshFailure.LOST: "a connection that lasts",
    SshFailure.COMMAND_TIMEOUT: "a command that ends",
}
# Where the error itself knows no remedy.
_REMEDIES = {
    SshFailure.DNS: "check the name, or give the address as HostName in your SSH configuration",
    SshFailure.REFUSED: "start sshd on the node, or check the port",
    SshFailure.UNREACHABLE: "check cables, routes and the jump host",
    SshFailure.TIMEOUT: "look at the node's console: is it up, is it overloaded?",
    SshFailure.HOST_KEY_UNKNOWN: "compare its fingerprint, then trust it with `burst hosts trust`",
    SshFailure.HOST_KEY_CHANGED: "compare its fingerprint, then `burst hosts forget` and `burst hosts trust`",
    SshFailure.AUTH: "add your public key to authorized_keys on the node, or set cluster.ssh.user and identity_file",
    SshFailure.PROTOCOL: "check that the port belongs to sshd",
    SshFailure.LOST: "look at the node's console and its kernel log",
    SshFailure.COMMAND_TIMEOUT: "look at the load, and for processes in state D, on the node",
}


def reach_finding(error: SshError, node: str) -> Finding:
    """FAIL: the node could not be reached; which of the many ways, and what to do about this one."""
    return Finding(
        REACH,
        node,
        Verdict.FAIL,
        one_line(error.detail, 400),
        _EXPECTED.get(error.kind, ""),
        one_line(error.remedy, 400) or _REMEDIES.get(error.kind, ""),
        evidence=error.kind.value,
    )


def answer_findings(probe: NodeProbe) -> list[Finding]:
    """Findings of one node that was reached: that it was, whether its answer is whole."""
    findings = [Finding(REACH, probe.node, Verdict.OK, "reached, its host key is the known one")]
    if probe.trouble:
        findings.append(incomplete_finding(probe))
    return findings


def incomplete_finding(probe: NodeProbe) -> Finding:
    """UNKNOWN: the answer of the node is not whole."""
    remedy = "run it again; look at the node's load and kernel log; more time: --timeout"
    return Finding("ssh.probe", probe.node, Verdict.UNKNOWN, one_line(probe.trouble, 400), "a complete answer", remedy)


def clock_findings(probes: Sequence[NodeProbe]) -> tuple[list[Finding], str]:
    """(one finding per node, what is wrong with the clock of this machine).

    A node is compared with the median of all nodes where there are three or more, else with this machine: what a run
    needs is that the nodes agree, and a wrong clock here must not condemn them all. How exactly a clock can be read at
    all, half a round trip, counts for the node.
    """
    offsets: Mapping[str, float] = {p.node: p.clock_offset_s for p in probes if p.clock_offset_s is not None}
    by_vote = len(offsets) >= _QUORUM
    middle = statistics.median(offsets.values()) if by_vote else 0.0
    reference = "most nodes" if by_vote else "this machine"
    findings = [_clock(probe, middle, reference) for probe in probes]
    if abs(middle) <= SKEW_WARN_S:
        return findings, ""
    word = "behind" if middle > 0 else "ahead of"
    return findings, f"the clock of this machine is {abs(middle):.3g} s {word} those of the nodes"


def _clock(probe: NodeProbe, middle: float, reference: str) -> Finding:
    expected = f"within {SKEW_WARN_S:g} s of {reference}"
    if probe.clock_offset_s is None:
        text = "the node told no time that makes sense"
        return Finding("ssh.clock", probe.node, Verdict.UNKNOWN, text, expected, "does `date +%s.%N` work there?")
    skew = probe.clock_offset_s - middle
    sure = abs(skew) - probe.clock_error_s
    severity = Verdict.FAIL if sure > SKEW_FAIL_S else Verdict.WARN if sure > SKEW_WARN_S else Verdict.OK
    if severity is Verdict.OK:
        return Finding("ssh.clock", probe.node, severity, f"within {SKEW_WARN_S:g} s", expected)
    text = f"its clock is {abs(skew):.3g} s {'ahead of' if skew > 0 else 'behind'} {reference}"
    return Finding("ssh.clock", probe.node, severity, text, expected, "start chrony or ntpd on the node")
