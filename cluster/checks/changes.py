"""What is different between two checks of the same nodes, for somebody who watches."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.access.nodes import fold_nodes
from cluster.checks.finding import Finding, Verdict
from cluster.checks.verdicts import FleetReport, NodeReport

_QUIET = frozenset({Verdict.OK, Verdict.SKIP})


@dataclass(frozen=True)
class Change:
    """Nodes that went from one verdict to another, the same findings having come and gone on all of them.

    came: the findings of the first of `nodes`. gone: their checks, with the device where there is one.
    """

    nodes: str
    before: Verdict | None
    after: Verdict
    came: tuple[Finding, ...]
    gone: tuple[str, ...]


def find_changes(before: FleetReport, after: FleetReport) -> list[Change]:
    """The nodes that are not as they were. Values that move while the check stays the same are no change."""
    members: dict[tuple[object, ...], list[str]] = {}
    changes: dict[tuple[object, ...], Change] = {}
    for name, report in after.nodes.items():
        change = _change(before.nodes.get(name), report)
        if change is None:
            continue
        key = (change.before, change.after, tuple(map(_identity, change.came)), change.gone)
        changes.setdefault(key, change)
        members.setdefault(key, []).append(name)
    return [
        Change(fold_nodes(members[key]), change.before, change.after, change.came, change.gone)
        for key, change in changes.items()
    ]


def _change(before: NodeReport | None, after: NodeReport) -> Change | None:
    old = {} if before is None else _bad(before)
    new = _bad(after)
    came = tuple(finding for key, finding in new.items() if key not in old)
    # A check that fails now instead of warning came; it did not go.
    left = {(check, device) for check, device, _ in new}
    gone = tuple(_label(check, device) for check, device, _ in old if (check, device) not in left)
    verdict = None if before is None else before.verdict
    if verdict == after.verdict and not came and not gone:
        return None
    return Change(after.node, verdict, after.verdict, came, gone)


def _bad(report: NodeReport) -> dict[tuple[str, str | None, Verdict], Finding]:
    return {_identity(finding): finding for finding in report.findings if finding.severity not in _QUIET}


def _identity(finding: Finding) -> tuple[str, str | None, Verdict]:
    return finding.check, finding.device, finding.severity


def _label(check: str, device: str | None) -> str:
    return f"{check} ({device})" if device else check
