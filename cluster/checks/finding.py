"""Findings: what a check saw on a node, what it should have seen, what to do about it; which nodes can be used; and
nodes that have the same things to say, said once: `node[1-3]: OK`."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.ssh.hosts import fold_nodes
from cluster.survey.facts import NodeFacts

REACH, PROBE = "ssh.reach", "ssh.probe"  # these two are made of every node
GIB = 1 << 30
_TEXT_CHARACTERS = 400
_PLACE = "\0"  # where the node's name stood; no cleaned text holds this character
_TEXTS = ("observed", "expected", "remedy")
AGAIN = "run the check again; see the evidence"  # where nothing better is known


class Verdict(enum.StrEnum):
    """How good something is, the worst last. UNKNOWN is not OK: what could not be seen does not pass.

    A skipped check says nothing as long as any other was made.
    """

    SKIP = "SKIP"
    OK = "OK"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    FAIL = "FAIL"

    @property
    def rank(self) -> int:
        """Its place among all; the worse, the higher."""
        return list(Verdict).index(self)

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to say: OK, or skipped."""
        return self in (Verdict.OK, Verdict.SKIP)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of `verdicts`; UNKNOWN of none, for nothing was seen."""
    return max(verdicts, key=lambda verdict: verdict.rank, default=Verdict.UNKNOWN)


@dataclass(frozen=True)
class Finding:
    """One check on one node, or on one device of it.

    check: dotted name, its group first: `gpu.count`. device: such as `GPU 3` or `mlx5_0/1`; None for the node.
    observed, expected, remedy: short sentences for a person. evidence: the line of output that it rests on.
    """

    check: str
    node: str
    severity: Verdict
    observed: str
    expected: str = ""
    remedy: str = ""
    device: str | None = None
    evidence: str = ""


@dataclass(frozen=True)
class Check:
    """Makes the findings of check `name` on `node`, each with what was expected."""

    node: str
    name: str
    expected: str = ""
    device: str | None = None

    def on(self, device: str) -> Check:
        """The same check on one device."""
        return replace(self, device=device)

    def expecting(self, expected: str) -> Check:
        """The same check with another expectation."""
        return replace(self, expected=expected)

    def ok(self, observed: str, evidence: str = "") -> Finding:
        """It is as it should be."""
        return self.finding(Verdict.OK, observed, "", evidence)

    def skip(self, observed: str) -> Finding:
        """It does not apply here."""
        return self.finding(Verdict.SKIP, observed)

    def warn(self, observed: str, remedy: str, evidence: str = "") -> Finding:
        """It works, and somebody should look at it."""
        return self.finding(Verdict.WARN, observed, remedy, evidence)

    def fail(self, observed: str, remedy: str, evidence: str = "") -> Finding:
        """A run would not work, or not well."""
        return self.finding(Verdict.FAIL, observed, remedy, evidence)

    def unknown(self, observed: str, remedy: str = AGAIN, evidence: str = "") -> Finding:
        """It could not be seen."""
        return self.finding(Verdict.UNKNOWN, observed, remedy, evidence)

    def finding(self, severity: Verdict, observed: str, remedy: str = "", evidence: str = "") -> Finding:
        """A finding of any severity."""
        observed = observed if len(observed) <= _TEXT_CHARACTERS else observed[:_TEXT_CHARACTERS] + "…"
        return Finding(self.name, self.node, severity, observed, self.expected, remedy, self.device, evidence)

    def above(self, value: float, limits: tuple[float, float], observed: str, remedy: str) -> Finding:
        """OK from the second limit on, a warning from the first on, else a failure."""
        if value < limits[0]:
            return self.fail(observed, remedy)
        return self.warn(observed, remedy) if value < limits[1] else self.ok(observed)


@dataclass(frozen=True)
class NodeReport:
    """All findings of one node."""

    node: str
    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst; UNKNOWN when there is no finding."""
        return worst(finding.severity for finding in self.findings)

    @property
    def usable(self) -> bool:
        """Whether a run may start on it: nothing failed, and nothing that was to be seen stayed unseen."""
        return self.verdict not in (Verdict.FAIL, Verdict.UNKNOWN)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict.value,
            "elapsed_s": round(self.elapsed_s, 3),
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True)
class FleetReport:
    """All nodes, in the order in which they were named. notes: what is wrong here, not on a node. facts: of the nodes
    that answered."""

    nodes: Mapping[str, NodeReport]
    elapsed_s: float = 0.0
    notes: tuple[str, ...] = ()
    facts: Mapping[str, NodeFacts] = field(default_factory=dict)

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the nodes that can be used."""
        return tuple(name for name, report in self.nodes.items() if report.usable)

    @property
    def exit_code(self) -> int:
        """0: every node is usable; 1: one failed; 3: none failed, but of one it is not known. No nodes: not known."""
        verdict = worst(report.verdict for report in self.nodes.values())
        return {Verdict.FAIL: 1, Verdict.UNKNOWN: 3}.get(verdict, 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "nodes": {name: report.to_dict() for name, report in self.nodes.items()},
            "usable": list(self.usable),
            "elapsed_s": round(self.elapsed_s, 3),
            "notes": list(self.notes),
        }


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


def gib(size_bytes: float) -> str:
    """`12.5 GiB`; small sizes in MiB."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / (1 << 20):.0f} MiB"


def age(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h` or `12 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
