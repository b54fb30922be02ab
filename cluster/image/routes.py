"""Who feeds whom while a push runs, and who takes over when a node or a link is lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Feed:
    """The launcher sends to `node` itself."""

    node: str


@dataclass(frozen=True)
class Link:
    """`sender` sends to `node`."""

    sender: str
    node: str


Order = Feed | Link


class Routes:
    """The feeder of every node; None stands for the launcher."""

    def __init__(self, chains: Sequence[Sequence[str]], *, star: bool = False) -> None:
        """`star`: the first node of a chain writes into a folder for the others, which nobody feeds."""
        self.feeder: dict[str, str | None] = {}
        self._star = star
        for chain in chains:
            for position, node in enumerate(chain):
                self.feeder[node] = None if position == 0 else chain[0] if star else chain[position - 1]

    def heads(self) -> list[Feed]:
        """What the launcher sends itself from the start."""
        return [Feed(node) for node, feeder in self.feeder.items() if feeder is None]

    def listeners(self) -> list[str]:
        """Nodes that another node will reach."""
        return [] if self._star else [node for node, feeder in self.feeder.items() if feeder is not None]

    def order(self, node: str) -> Order:
        """What has to happen for `node` to be fed as it stands."""
        feeder = self.feeder[node]
        return Feed(node) if feeder is None else Link(feeder, node)

    def from_launcher(self, node: str) -> Feed:
        """From now on the launcher feeds `node`; the nodes behind it stay there."""
        self.feeder[node] = None
        return Feed(node)

    def lost(self, node: str, waiting: Sequence[str]) -> list[Order]:
        """Orders that close the gap after `node`: whoever it fed and still waits gets its feeder instead."""
        above = self.feeder.pop(node, None)
        orders: list[Order] = []
        heir = above
        for target in [name for name, feeder in self.feeder.items() if feeder == node]:
            self.feeder[target] = heir
            if target in waiting:
                orders.append(self.order(target))
                if self._star and heir is None:
                    heir = target  # the first that is left writes for the others
        return [order for order in orders if not (self._star and isinstance(order, Link))]
