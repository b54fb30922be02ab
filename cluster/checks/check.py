"""Findings of one check on one node, in few words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.checks.finding import Finding, Verdict

GIB = 1 << 30
_TEXT_CHARACTERS = 400


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

    def unknown(self, observed: str, remedy: str = "", evidence: str = "") -> Finding:
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
