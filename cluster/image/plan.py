"""`ImagePlan`: which node gets the image from whom. Pure: `--dry-run` shows it, `cluster.image.push` runs it."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.image.archive import Packing

DIRECT_NODES = 2  # so many are served from here; from three on nodes feed each other
_SPARE_FEEDERS = 3
_FIRST_WITH_ZSTD = 23  # of Docker; for older ones unpacking gzip costs more than it saves on the way


class Route(enum.StrEnum):
    """How layers get to a node."""

    NONE = "none"  # nothing has to get there
    DIRECT = "direct"  # from the launcher
    CHAIN = "chain"  # from another node
    REFUSED = "refused"  # it cannot get the image; `problem` says why


@dataclass(frozen=True)
class NodePlan:
    """What happens on one node. feeders: nodes to ask for layers, one after the other; last of all the launcher.

    engine: what its `version` says; problem: why it cannot get the image at all.
    """

    node: str
    route: Route
    feeders: tuple[str, ...] = ()
    engine: str = ""
    problem: str = ""

    @property
    def is_pulling(self) -> bool:
        """Whether it gets layers."""
        return self.route in (Route.DIRECT, Route.CHAIN)


@dataclass(frozen=True)
class ImagePlan:
    """One push. limit: bytes/s of each sender. nodes: in the order that they were given."""

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
        return tuple(node for node in self.nodes if node.is_pulling)


def choose_feeders(nodes: Sequence[NodePlan], route: str) -> tuple[NodePlan, ...]:
    """`nodes`, of which those on the way DIRECT may now be fed by others of these."""
    lacking = [node.node for node in nodes if node.route is Route.DIRECT]
    if route == "direct" or (route == "auto" and len(lacking) <= DIRECT_NODES):
        return tuple(nodes)
    found = []
    for node in nodes:
        place = lacking.index(node.node) if node.route is Route.DIRECT else 0
        feeders = tuple(reversed(lacking[max(0, place - _SPARE_FEEDERS) : place]))
        found.append(replace(node, route=Route.CHAIN, feeders=feeders) if feeders else node)
    return tuple(found)


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
