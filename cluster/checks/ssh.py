"""Group ssh: can the node be reached, is its clock right."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cluster.checks.finding import Check, Finding
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe
from engine.config.errors import BurstError

REACH, PROBE = "ssh.reach", "ssh.probe"
EXPLANATIONS: Mapping[str, str] = {
    REACH: "The node could be reached over SSH and showed the host key that is known; if not, which step failed.",
    PROBE: "The node's answer came whole. If not, every check that rests on a missing part is UNKNOWN.",
    "ssh.clock": "The node's clock against the median of all nodes (of fewer than three: against this machine): logs "
    "of several nodes can only be compared with equal clocks.",
}
SKEW_WARN_S = 1.0
SKEW_FAIL_S = 5.0
_QUORUM = 3  # clocks that can outvote ours
# Where the error itself knows no remedy.
_REMEDIES = {
    SshFailure.UNREACHABLE: "check cables, routes and the jump host",
    SshFailure.TIMEOUT: "look at the node's console: is it up, is it overloaded?",
    SshFailure.PROTOCOL: "check that the port belongs to sshd",
    SshFailure.LOST: "look at the node's console and its kernel log",
    SshFailure.COMMAND_TIMEOUT: "look at the load, and for processes in state D, on the node",
}


def reach_finding(error: BurstError | None, node: str) -> Finding:
    """FAIL: the node could not be reached; which of the many ways, and what to do about this one."""
    check = Check(node, REACH, "a connection")
    if not isinstance(error, SshError):
        return check.fail(one_line(str(error), 400), "")
    remedy = one_line(error.remedy, 400) or _REMEDIES.get(error.kind, "")
    return check.fail(one_line(error.detail, 400), remedy, error.kind.value)


def answer_findings(probe: NodeProbe) -> list[Finding]:
    """Findings of one node that was reached: that it was, then whether its answer is whole."""
    findings = [Check(probe.node, REACH).ok("reached, its host key is the known one")]
    if probe.trouble:
        remedy = "run it again; look at the node's load and kernel log; more time: --timeout"
        check = Check(probe.node, PROBE, "a complete answer")
        findings.append(check.unknown(one_line(probe.trouble, 400), remedy))
    return findings


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
    check = Check(probe.node, "ssh.clock", f"within {SKEW_WARN_S:g} s of {reference}")
    if probe.clock_offset_s is None:
        return check.unknown("the node told no time that makes sense", "does `date +%s.%N` work there?")
    skew = probe.clock_offset_s - middle
    sure = abs(skew) - probe.clock_error_s
    if sure <= SKEW_WARN_S:
        return check.ok(f"within {SKEW_WARN_S:g} s")
    text = f"its clock is {abs(skew):.3g} s {'ahead of' if skew > 0 else 'behind'} {reference}"
    return (check.fail if sure > SKEW_FAIL_S else check.warn)(text, "start chrony or ntpd on the node")
