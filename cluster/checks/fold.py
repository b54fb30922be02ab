"""Nodes that have the same things to say, said once: `node[1-3]: OK`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cluster.checks.finding import Finding, NodeReport, Verdict
from cluster.checks.ssh import REACH
from cluster.ssh.nodes import fold_nodes

_PLACE = "\0"  # where the node's name stood; no cleaned text holds this character
_TEXTS = ("observed", "expected", "remedy")


@dataclass(frozen=True)
class NodeFold:
    """Nodes with the same verdict and the same findings; in these, `nodes` stands where each node's own name stood."""

    nodes: str
    names: tuple[str, ...]
    verdict: Verdict
    findings: tuple[Finding, ...]


def fold_reports(reports: Iterable[NodeReport], *, all_findings: bool = False) -> list[NodeFold]:
    """The nodes folded, the healthy first, the worst last and so nearest to the reader's eye.

    What differs between nodes although nothing is wrong (times, versions that pass) does not keep them apart: findings
    that are OK or skipped are left out, unless `all_findings`.
    """
    folds: dict[tuple[object, ...], list[NodeReport]] = {}
    for report in reports:
        told = tuple(_key(_anonymous(finding)) for finding in _shown(report, all_findings))
        folds.setdefault((report.verdict, told), []).append(report)
    found = [_fold(members, all_findings) for members in folds.values()]
    return sorted(found, key=lambda fold: fold.verdict.rank)


def _shown(report: NodeReport, all_findings: bool) -> list[Finding]:
    return [finding for finding in report.findings if all_findings or not finding.severity.is_fine]


def _key(finding: Finding) -> Finding:
    if finding.check != REACH:
        return finding
    return replace(finding, observed=re.sub(r"\d+", "", finding.observed))  # addresses: those of the first are told


def _fold(members: list[NodeReport], all_findings: bool) -> NodeFold:
    names = tuple(report.node for report in members)
    nodes = fold_nodes(names)
    findings = [_with_nodes(_anonymous(finding), nodes) for finding in _shown(members[0], all_findings)]
    told = sorted(_said_once(findings), key=lambda finding: -finding.severity.rank)
    return NodeFold(nodes, names, members[0].verdict, tuple(told))


def _said_once(findings: Iterable[Finding]) -> list[Finding]:
    """As one what is said of several devices, and what several checks could not see or skipped for the same reason."""
    same: dict[Finding, list[Finding]] = {}
    for finding in findings:
        check = "" if finding.severity in (Verdict.SKIP, Verdict.UNKNOWN) else finding.check
        same.setdefault(replace(finding, check=check, device=None), []).append(finding)
    return [
        replace(one, check=_listed(f.check for f in told), device=_listed(f.device or "" for f in told) or None)
        for one, told in same.items()
    ]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, words)))


def _anonymous(finding: Finding) -> Finding:
    """The finding with a place for the node's name where it stands as a whole word."""
    word = re.compile(rf"(?<![\w.-]){re.escape(finding.node)}(?![\w-]|\.\w)")

    texts: dict[str, Any] = {name: word.sub(_PLACE, getattr(finding, name)) for name in _TEXTS}
    return replace(finding, node=_PLACE, evidence="", **texts)


def _with_nodes(finding: Finding, nodes: str) -> Finding:
    return replace(finding, node=nodes, **{name: getattr(finding, name).replace(_PLACE, nodes) for name in _TEXTS})
