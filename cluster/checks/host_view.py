"""One node as the checks of group `host` see it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.checks.check import Check, gib
from cluster.checks.finding import Finding
from cluster.survey.lines import Answer, Filesystem
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig


@dataclass(frozen=True)
class HostView:
    """The answer of a node; each check reads a section of it."""

    probe: NodeProbe
    config: ClusterConfig

    @property
    def in_containers(self) -> bool:
        """Whether ranks run in containers."""
        return self.config.container.runtime == "docker"

    def answer(self, section: str) -> Answer:
        """One section. Raises UnreadableError."""
        return Answer(self.probe, section)


def judge_room(check: Check, room: Filesystem | None, limits: tuple[float, float]) -> Finding:
    """Whether enough bytes are free there."""
    if room is None:
        return check.unknown("not there")
    text = f"{gib(room.free_bytes)} free of {gib(room.size_bytes)} ({room.kind})"
    remedy = f"free space on {check.device}, or put it on a larger disk"
    return check.expecting(f"at least {gib(limits[1])} free").above(room.free_bytes, limits, text, remedy)
