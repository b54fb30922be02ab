"""`ImagePlan`: which node gets the image from whom. Pure: `--dry-run` shows it, `cluster.image.push` runs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.image.archive import Packing

DIRECT_NODES = 2  # so many are served from here; from three on nodes feed each other
_SPARE_FEEDERS = 3
_FIRST_WITH_ZSTD = 23  # of Docker; for older ones unpacking gzip costs more than it saves on the way


@dataclass(frozen=True)
class NodePlan:
    """What happens on one node.

    route: how layers get there; "none": it has the image, "direct": from the launcher, "chain": from `feeders`, nodes
    that are asked one after the other, and last of all from the launcher, "refused": not at all, `problem` says why.
    engine: what its `version` says.
    """

    node: str
    route: Literal["none", "direct", "chain", "refused"]
    feeders: tuple[str, ...] = ()
    engine: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ImagePlan:
    """One push. limit: of what leaves the launcher, in bytes/s. nodes: in the order that they were given."""

    image: str
    identity: str
    layers: int
    unpacked_bytes: int
    packing: Packing
    limit: float | None
    nodes: tuple[NodePlan, ...]

    @property
    def pulling(self) -> tuple[NodePlan, ...]:
        """Nodes that get layers."""
        return tuple(node for node in self.nodes if node.route in ("direct", "chain"))


def choose_feeders(nodes: Sequence[NodePlan]) -> tuple[NodePlan, ...]:
    """`nodes`; where more than DIRECT_NODES lack the image, all of these but the first are fed by those before them."""
    lacking = [node for node in nodes if node.route == "direct"]
    fed = {}
    for place, node in enumerate(lacking[1:] if len(lacking) > DIRECT_NODES else [], 1):
        feeders = reversed(lacking[max(0, place - _SPARE_FEEDERS) : place])
        fed[node] = replace(node, route="chain", feeders=tuple(feeder.node for feeder in feeders))
    return tuple(fed.get(node, node) for node in nodes)


def choose_packing(nodes: Sequence[NodePlan]) -> Packing:
    """The best packing that all engines take."""
    takes_zstd = (is_podman(node.engine) or _version(node.engine) >= _FIRST_WITH_ZSTD for node in nodes)
    return "zstd" if all(takes_zstd) else "none"


def is_podman(engine: str) -> bool:
    """Whether an engine that says this of itself needs to be told that a loopback registry has no TLS."""
    return "podman" in engine.lower()


def _version(engine: str) -> int:
    """23 of "... Server: Docker Engine Engine: Version: 23.0.1 ...": the client's may be another."""
    match = re.search(r"\bVersion: *([0-9]{1,4})\.", engine.partition("Server:")[2])
    return int(match[1]) if match else 0
