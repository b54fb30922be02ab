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
    folds: dict[tuple[object, ...], tuple[list[str], list[Finding]]] = {}
    for report in reports:
        shown = [one for one in report.findings if all_findings or not one.severity.is_fine]
        anonymous = [_named(one, rf"(?<![\w.-]){re.escape(one.node)}(?![\w-]|\.\w)", _PLACE) for one in shown]
        key = report.verdict, *map(_key, anonymous)
        folds.setdefault(key, ([], anonymous))[0].append(report.node)
    found = [_fold(key[0], *members) for key, members in folds.items()]
    return sorted(found, key=lambda fold: fold.verdict.rank)


def _key(finding: Finding) -> Finding:
    """What must be the same; of addresses those of the first are told."""
    text = re.sub(r"\d+", "", finding.observed) if finding.check == REACH else finding.observed
    return replace(finding, observed=text)


def _named(finding: Finding, old: str, new: str) -> Finding:
    texts: dict[str, Any] = {name: re.sub(old, lambda _: new, getattr(finding, name)) for name in _TEXTS}
    return replace(finding, node=new, evidence="", **texts)


def _fold(verdict: Any, names: list[str], findings: Iterable[Finding]) -> NodeFold:
    """As one what is said of several devices, and what several checks could not see or skipped for the same reason."""
    nodes, same = fold_nodes(names), dict[Finding, list[Finding]]()
    for finding in findings:
        named = _named(finding, _PLACE, nodes)
        check = "" if finding.severity in (Verdict.SKIP, Verdict.UNKNOWN) else finding.check
        same.setdefault(replace(named, check=check, device=None), []).append(named)
    told = [
        replace(one, check=_listed(f.check for f in told), device=_listed(f.device for f in told) or None)
        for one, told in same.items()
    ]
    return NodeFold(nodes, tuple(names), verdict, tuple(sorted(told, key=lambda one: -one.severity.rank)))


def _listed(words: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(filter(None, words)))
