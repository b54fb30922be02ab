"""Group ssh: every way of not reaching a node is a different answer, and clocks are compared fairly."""

from __future__ import annotations

import pytest
from testkit.check_fakes import told

from cluster.checks.finding import Finding, Verdict
from cluster.checks.ssh import answer_findings, clock_findings, reach_finding
from cluster.errors import ClusterError, SshError, SshFailure
from cluster.survey.section import NodeProbe


def clock(node: str, offset_s: float | None, error_s: float = 0.01) -> NodeProbe:
    return NodeProbe(node, {}, offset_s, error_s)


@pytest.mark.parametrize(
    ("error", "remedy", "evidence"),
    [
        (SshError("n1", SshFailure.LOST, "went\n\x1b[31mwrong", "do this"), "do this", "lost"),
        (
            SshError("n1", SshFailure.TIMEOUT, "went wrong"),
            "look at the node's console: is it up, is it overloaded?",
            "timeout",
        ),
        (ClusterError("went wrong"), "", ""),
    ],
)
def test_a_node_that_was_not_reached_fails_and_the_error_says_what_to_do(
    error: ClusterError, remedy: str, evidence: str
) -> None:
    expected = Finding("ssh.reach", "n1", Verdict.FAIL, "went wrong", "a connection", remedy, None, evidence)
    assert reach_finding(error, "n1") == expected


def test_an_answer_that_is_not_whole_is_unknown() -> None:
    reached, probe = answer_findings(NodeProbe("n1", {}, trouble="it broke\noff"))
    assert (reached.check, reached.severity) == ("ssh.reach", Verdict.OK)
    assert (probe.check, probe.severity, probe.observed) == ("ssh.probe", Verdict.UNKNOWN, "it broke off")


@pytest.mark.parametrize(
    ("offset_s", "error_s", "severity", "observed"),
    [
        (0.9, 0.01, Verdict.OK, "within 1 s"),
        (-1.2, 0.01, Verdict.WARN, "its clock is 1.2 s behind this machine"),
        (1.2, 0.01, Verdict.WARN, "its clock is 1.2 s ahead of this machine"),
        (4.9, 0.01, Verdict.WARN, "its clock is 4.9 s ahead of this machine"),
        (5.2, 0.01, Verdict.FAIL, "its clock is 5.2 s ahead of this machine"),
        (-60, 0.01, Verdict.FAIL, "its clock is 60 s behind this machine"),
        # What the measurement cannot be sure of passes.
        (1.4, 0.5, Verdict.OK, "within 1 s"),
        (5.4, 0.5, Verdict.WARN, "its clock is 5.4 s ahead of this machine"),
        (None, 0.0, Verdict.UNKNOWN, "the node told no time that makes sense"),
    ],
)
def test_skew_against_this_machine(offset_s: float | None, error_s: float, severity: Verdict, observed: str) -> None:
    (finding,), note = clock_findings([clock("n1", offset_s, error_s)])
    assert (finding.check, finding.severity, finding.observed) == ("ssh.clock", severity, observed)
    assert (finding.expected, note) == ("within 1 s of this machine", "")


def test_a_wrong_clock_of_this_machine_does_not_condemn_the_nodes() -> None:
    findings, note = clock_findings([clock(f"n{n}", 100.0) for n in range(3)] + [clock("odd", 0.0)])
    assert told(findings) == [
        "FAIL ssh.clock: its clock is 100 s behind most nodes; expected: within 1 s of most nodes"
    ]
    assert note == "the clock of this machine is 100 s behind those of the nodes"
