"""From findings to what matters: which nodes can be used, and the exit code of the check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import Finding, Verdict, worst

USABLE = frozenset({Verdict.OK, Verdict.WARN, Verdict.SKIP})
EXIT_OK, EXIT_FAILED, EXIT_UNKNOWN = 0, 1, 3


def overall(severities: Iterable[Verdict]) -> Verdict:
    """The worst, where a skipped check says nothing as long as any other was made."""
    told = list(severities)
    return worst([severity for severity in told if severity is not Verdict.SKIP] or told)


@dataclass(frozen=True)
class NodeReport:
    """All findings of one node."""

    node: str
    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """See `overall`; UNKNOWN when there is no finding."""
        return overall(finding.severity for finding in self.findings)

    @property
    def usable(self) -> bool:
        """Whether a run may start on it: nothing failed, and nothing that was to be seen stayed unseen."""
        return self.verdict in USABLE

    def group_verdict(self, group: str) -> Verdict | None:
        """The verdict of one group; None when it gave no finding."""
        found = [finding.severity for finding in self.findings if finding.check.partition(".")[0] == group]
        return overall(found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict.value,
            "elapsed_s": round(self.elapsed_s, 3),
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class FleetReport:
    """All nodes, in the order in which they were named. notes: what is wrong here, not on a node."""

    nodes: Mapping[str, NodeReport]
    elapsed_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the nodes that can be used."""
        return tuple(name for name, report in self.nodes.items() if report.usable)

    @property
    def exit_code(self) -> int:
        """0: every node is usable; 1: one failed; 3: none failed, but of one it is not known. No nodes: not known."""
        return exit_code(report.verdict for report in self.nodes.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodes": {name: report.to_dict() for name, report in self.nodes.items()},
            "usable": list(self.usable),
            "elapsed_s": round(self.elapsed_s, 3),
            "notes": list(self.notes),
        }


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """What the process returns for nodes with these verdicts."""
    overall = worst(verdicts)
    if overall is Verdict.FAIL:
        return EXIT_FAILED
    return EXIT_UNKNOWN if overall is Verdict.UNKNOWN else EXIT_OK
