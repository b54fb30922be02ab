"""A group of checks, and how each of them is run: what cannot be read is UNKNOWN, and so is what breaks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from cluster.checks.check import Check
from cluster.checks.finding import Finding
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.survey.section import NodeProbe, Question, UnreadableError
from engine.config.cluster import ClusterConfig

# Findings of one check: one for every device that is not as it should be, at least one.
Judge = Callable[[Check, Any], Iterable[Finding]]
# A test of nodes with each other, over their open connections, with the answers to their probes.
TestBetween = Callable[[Mapping[str, Connection], Mapping[str, NodeProbe]], list[Finding]]


class CheckGroup:
    """One group of checks: `gpu`, `ib`, `net`, `host`. Pure: everything comes from the probe's sections.

    name: first part of the names of its checks, and the word of --only and --skip. questions: what its nodes are asked.
    checks: what judges each check, by its name; the docstring is what `--explain` says. compared: what is known of
    several nodes only, by traits or by `check_fleet`, with what `--explain` says.
    """

    name: ClassVar[str]
    questions: ClassVar[tuple[Question, ...]] = ()
    checks: ClassVar[Mapping[str, Judge]]
    compared: ClassVar[Mapping[str, str]] = {}

    def look(self, probe: NodeProbe, config: ClusterConfig) -> Any:
        """What each judge is given: the answer of one node, read. May raise UnreadableError."""
        return probe

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Findings of one node, at least one for every check that applies: OK is a finding, too."""
        checks = [Check(probe.node, name) for name in self.checks]
        try:
            view = self.look(probe, config)
        except UnreadableError as error:
            return [_unreadable(check, error) for check in checks]
        return [finding for check in checks for finding in self._run(check, view)]

    def traits(self, probe: NodeProbe, config: ClusterConfig) -> Mapping[str, str]:
        """What must be the same on all nodes, by check: {"gpu.driver": "550.54"}; what is not known is left out."""
        return {}

    def check_fleet(self, probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
        """Findings that rest on several nodes, beside those of traits. probes: by name of the node."""
        return []

    def tests_between(self, config: ClusterConfig) -> Mapping[str, TestBetween]:
        """Tests that need several nodes at once, by check."""
        return {}

    def probe_settings(self, config: ClusterConfig) -> Mapping[str, str]:
        """Variables that its questions read."""
        return {}

    def explanations(self) -> dict[str, str]:
        """What each check means, in a sentence or two."""
        told = {name: " ".join((judge.__doc__ or "").split()) for name, judge in self.checks.items()}
        return {**told, **self.compared}

    def _run(self, check: Check, view: Any) -> list[Finding]:
        try:
            found = list(self.checks[check.name](check, view))
        except UnreadableError as error:
            return [_unreadable(check, error)]
        except Exception as error:
            return [broken(check, error)]
        return found or [check.unknown("this check gave no result")]


def broken(check: Check, error: BaseException) -> Finding:
    """UNKNOWN: a bug of ours, or an answer that nobody thought of; the place in the code is the evidence."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    text = one_line(f"the check broke: {type(error).__name__}: {error}", 300)
    return check.expecting("a result").unknown(text, "report this with the output of --json", place)


def _unreadable(check: Check, error: UnreadableError) -> Finding:
    return check.unknown(str(error), error.remedy or "run the check again; see the evidence", error.evidence)
