"""Checks and findings: what a check saw on a node, what it should have seen, what to do about it; groups of checks,
how each is run (what cannot be read is UNKNOWN, and so is what breaks), which are wanted and which nodes can be used;
and nodes that have the same things to say, said once: `node[1-3]: OK`.
"""

from __future__ import annotations

import enum
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import fold_nodes
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NotApplicableError, Question, UnreadableError
from engine.config.cluster import ClusterConfig

REACH, PROBE = "ssh.reach", "ssh.probe"  # these two are made of every node
GIB = 1 << 30
_TEXT_CHARACTERS = 400
_PLACEHOLDER = "\0"  # where the node's name stood; no cleaned text holds this character
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
        anonymous = [_named(one, rf"(?<![\w.-]){re.escape(one.node)}(?![\w-]|\.\w)", _PLACEHOLDER) for one in shown]
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
        named = _named(finding, _PLACEHOLDER, nodes)
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


# --- groups of checks -------------------------------------------------------------------------------------------------


SSH_GROUP = "ssh"
ALWAYS = (REACH, PROBE)
D = TypeVar("D")
T = TypeVar("T")
# Findings of one check of what `look` gave: one for every device that is not as it should be, at least one.
Judge = Callable[[Check, Any], Iterable[Finding]]
# A test of nodes with each other, over their open connections, with their facts.
TestBetween = Callable[[Mapping[str, Connection], Mapping[str, NodeFacts]], list[Finding]]
Compare = Callable[[Mapping[str, NodeFacts]], list[Finding]]


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class CheckGroup:
    """Checks that rest on the same answers. Pure, but for `between`.

    name: first part of the names of its checks, and the word of --only and --skip; groups may share it.
    questions: all that nodes are asked for these checks, with the variables `settings` exported.
    look: what the judges need of the facts. It and they may raise UnreadableError and NotApplicableError.
    judges: `check_pcie` of group `gpu` makes the findings of `gpu.pcie`; its docstring is what `--explain` says.
    traits: what must be the same on all nodes, by check ({"gpu.driver": "550.54"}); None or left out: not known.
    compare: findings that rest on several nodes. between: tests that need several nodes at once, by
    check. compared: what `--explain` says of checks that only these two know.
    """

    name: str
    judges: tuple[Judge, ...]
    look: Callable[[NodeFacts], Any] = field(default=lambda facts: facts)
    questions: tuple[Question, ...] = ()
    settings: Callable[[ClusterConfig], Mapping[str, str | None]] = _nothing
    traits: Callable[[NodeFacts], Mapping[str, str | None]] = _nothing
    compare: Compare = field(default=lambda nodes: [])
    between: Callable[[ClusterConfig], Mapping[str, TestBetween]] = _nothing
    compared: Mapping[str, str] = field(default_factory=dict)

    @property
    def checks(self) -> dict[str, Judge]:
        """Its checks by name."""
        return {f"{self.name}.{judge.__name__.removeprefix('check_')}": judge for judge in self.judges}

    def check(self, facts: NodeFacts) -> list[Finding]:
        """Findings of one node, at least one for every check: OK is a finding, too."""
        checks = {Check(facts.node, name): judge for name, judge in self.checks.items()}
        try:
            view = self.look(facts)
        except (UnreadableError, NotApplicableError) as error:
            return [_unseen(check, error) for check in checks]
        return [finding for check, judge in checks.items() for finding in run_check(check, judge, view)]

    def told(self, facts: NodeFacts) -> dict[str, str]:
        """The traits of one node."""
        return {name: value for name, value in (known(self.traits, facts) or {}).items() if value}

    def explanations(self) -> dict[str, str]:
        """What each check means, in a sentence or two."""
        return {name: " ".join((judge.__doc__ or "").split()) for name, judge in self.checks.items()} | {
            **self.compared
        }


def run_check(check: Check, judge: Judge, view: Any) -> list[Finding]:
    """What `judge` finds; UNKNOWN where it cannot read what it needs, breaks or says nothing."""
    try:
        found = list(judge(check, view))
    except (UnreadableError, NotApplicableError) as error:
        return [_unseen(check, error)]
    except Exception as error:
        return [broken(check, error)]
    return found or [check.unknown("this check gave no result")]


def each(
    check: Check, devices: Mapping[str, D], judge: Callable[[Check, D], Finding | None], fine: str
) -> list[Finding]:
    """A finding for every device, by name, that `judge` says something of; one OK with `fine` when it says nothing.

    UNKNOWN where there is no device to look at: all of none is no good news.
    """
    if not devices:
        return [check.expecting("").unknown("there is none to look at", "see the other findings of the group")]
    told = [_judge(check.on(name), judge, device) for name, device in devices.items()]
    return [finding for finding in told if finding is not None] or [check.ok(fine)]


def _judge(check: Check, judge: Callable[[Check, D], Finding | None], device: D) -> Finding | None:
    try:
        return judge(check, device)
    except (UnreadableError, NotApplicableError) as error:
        return _unseen(check, error)


def known(read: Callable[[Any], T], view: Any) -> T | None:
    """What `read` tells of `view`; None where it cannot be read, or is not there."""
    try:
        return read(view)
    except (UnreadableError, NotApplicableError):
        return None


def broken(check: Check, error: BaseException) -> Finding:
    """UNKNOWN: a bug of ours, or an answer that nobody thought of; the place in the code is the evidence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    text = one_line(f"the check broke: {type(error).__name__}: {error}", 300)
    return check.expecting("a result").unknown(text, "report this with the output of --json", place)


def _unseen(check: Check, error: UnreadableError | NotApplicableError) -> Finding:
    if isinstance(error, NotApplicableError):
        return check.skip(str(error))
    return check.unknown(str(error), error.remedy or "run the check again; see the evidence", error.evidence)


@dataclass(frozen=True)
class Selection:
    """only: nothing else is wanted; empty: everything is. skip: not wanted. `ssh.reach` and `ssh.probe` always are.

    may_lack: it is no matter when a check that --only names gives no result.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    may_lack: bool = False

    def wants(self, check: str) -> bool:
        """Whether findings of `check` are shown and count."""
        if check in ALWAYS:
            return True
        return (not self.only or covers(self.only, check)) and not covers(self.skip, check)

    def apply(self, node: str, findings: Iterable[Finding], between: Iterable[str] = ()) -> tuple[Finding, ...]:
        """The findings of a node that are wanted, with UNKNOWN for every check that --only names and that gave nothing.

        What nobody looked at does not pass; of a node that was not reached that is said already. between: checks that
        need other nodes.
        """
        found = tuple(finding for finding in findings if self.wants(finding.check))
        if self.may_lack or any(finding.check == REACH and finding.severity is not Verdict.OK for finding in found):
            return found
        why = dict.fromkeys(between, "it is made between nodes, and no other was reached")
        missing = (
            Finding(word, node, Verdict.UNKNOWN, why.get(word, "this check gave no result"), "a result")
            for word in self.only
            if word.partition(".")[0] != SSH_GROUP and not any(covers((word,), finding.check) for finding in found)
        )
        return (*found, *missing)


def covers(words: Sequence[str], check: str) -> bool:
    """Whether one of `words` is the check or its group."""
    return any(check == word or check.startswith(f"{word}.") for word in words)
