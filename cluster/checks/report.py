"""Findings of one check on one node in few words, and the frame that turns an unreadable section into UNKNOWN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.checks.finding import Finding, Verdict
from cluster.parse.host import GIB
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

_TEXT_CHARACTERS = 400


@dataclass(frozen=True)
class Report:
    """Makes the findings of check `check` on `node`, each with what was expected."""

    node: str
    check: str
    expected: str = ""
    device: str | None = None

    def on(self, device: str) -> Report:
        """The same check on one device."""
        return replace(self, device=device)

    def ok(self, observed: str, evidence: str = "") -> Finding:
        """It is as it should be."""
        return self._finding(Verdict.OK, observed, "", evidence)

    def skip(self, observed: str) -> Finding:
        """It does not apply here."""
        return self._finding(Verdict.SKIP, observed, "", "")

    def warn(self, observed: str, remedy: str, evidence: str = "") -> Finding:
        """It works, and somebody should look at it."""
        return self._finding(Verdict.WARN, observed, remedy, evidence)

    def fail(self, observed: str, remedy: str, evidence: str = "") -> Finding:
        """A run would not work, or not well."""
        return self._finding(Verdict.FAIL, observed, remedy, evidence)

    def unknown(self, observed: str, remedy: str = "", evidence: str = "") -> Finding:
        """It could not be seen."""
        return self._finding(Verdict.UNKNOWN, observed, remedy, evidence)

    def _finding(self, severity: Verdict, observed: str, remedy: str, evidence: str) -> Finding:
        observed = observed if len(observed) <= _TEXT_CHARACTERS else observed[:_TEXT_CHARACTERS] + "…"
        return Finding(self.check, self.node, severity, observed, self.expected, remedy, self.device, evidence)


@dataclass(frozen=True)
class Part:
    """Checks that rest on one section: each of `checks` is UNKNOWN when it cannot be read."""

    section: str
    checks: tuple[str, ...]
    run: Callable[[NodeProbe, ClusterConfig], list[Finding]]


def run_parts(parts: Sequence[Part], probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """The findings of all parts, in their order."""
    return [finding for part in parts for finding in _run_part(part, probe, config)]


def _run_part(part: Part, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    try:
        return part.run(probe, config)
    except UnreadableError as error:
        missing = probe.section(part.section).tool_missing
        remedy = "install coreutils and awk on the node" if missing else "run the check again; see the evidence"
        text = f"a tool of the probe is missing ({part.section})" if missing else str(error)
        return [Report(probe.node, check).unknown(text, remedy, error.evidence) for check in part.checks]


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
