"""Findings: what a check saw on a node, what it should have seen, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cluster.probe.section import NodeProbe
from engine.config.cluster import ClusterConfig


class Verdict(enum.StrEnum):
    """How good something is. UNKNOWN is not OK: what could not be seen does not pass."""

    OK = "OK"
    SKIP = "SKIP"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    FAIL = "FAIL"


_RANK = {verdict: rank for rank, verdict in enumerate(Verdict)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of `verdicts`: FAIL, UNKNOWN, WARN, SKIP, OK in this order; UNKNOWN of none, for nothing was seen."""
    return max(verdicts, key=_RANK.__getitem__, default=Verdict.UNKNOWN)


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with these names as keys."""
        return {**asdict(self), "severity": self.severity.value}


class CheckGroup(Protocol):
    """One group of checks: `gpu`, `ib`, `net`, `host`. Pure: everything comes from the probe's sections."""

    @property
    def name(self) -> str:
        """First part of the names of its checks, the word of --only and --skip, and the name of its probe script."""

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Findings of one node, at least one for every check that applies: OK is a finding, too."""

    def traits(self, probe: NodeProbe) -> Mapping[str, str]:
        """What must be the same on all nodes, by check: {"gpu.driver": "550.54"}; what is not known is left out."""
