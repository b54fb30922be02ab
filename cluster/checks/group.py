"""A group of checks, how each of them is run (what cannot be read is UNKNOWN, and so is what breaks), and which are
wanted."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cluster.checks.finding import PROBE, REACH, Check, Finding, Verdict
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.survey.facts import NodeFacts
from cluster.survey.section import AbsentError, Question, UnreadableError
from engine.config.cluster import ClusterConfig

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
    look: what the judges need of the facts. It and they may raise UnreadableError and AbsentError.
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
        except (UnreadableError, AbsentError) as error:
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
    except (UnreadableError, AbsentError) as error:
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
    except (UnreadableError, AbsentError) as error:
        return _unseen(check, error)


def known(read: Callable[[Any], T], view: Any) -> T | None:
    """What `read` tells of `view`; None where it cannot be read, or is not there."""
    try:
        return read(view)
    except (UnreadableError, AbsentError):
        return None


def broken(check: Check, error: BaseException) -> Finding:
    """UNKNOWN: a bug of ours, or an answer that nobody thought of; the place in the code is the evidence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    text = one_line(f"the check broke: {type(error).__name__}: {error}", 300)
    return check.expecting("a result").unknown(text, "report this with the output of --json", place)


def _unseen(check: Check, error: UnreadableError | AbsentError) -> Finding:
    if isinstance(error, AbsentError):
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
