"""The rehearsal network as a value: which commands build it and what every rank's addresses are.

Every rank is a network namespace with two interfaces:

    node    to a bridge that it shares with the ranks of its node, unshaped
    rail    to a bridge that all ranks share, with RATE in both directions: the rank's own network card

Gloo binds to the address of `node`. Addresses of other nodes are routed over `rail`, so one address serves both kinds
of link and no packet needs to be classified.

                 node bridge 0                    node bridge 1
              |      |      |                  |      |      |
            rank 0 rank 1 ...                rank 4 rank 5 ...
              |      |      |                  |      |      |
              +------+------+--- rail bridge --+------+------+      RATE on every line, both ways
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "brig"  # of every namespace; tear-down removes all that begin with it, and nothing else
SWITCH = f"{PREFIX}sw"
NODE_INTERFACE = "node"
RAIL_INTERFACE = "rail"
RAIL_BRIDGE = "rails"

Command = tuple[str, ...]


@dataclass(frozen=True)
class Rig:
    """`nodes` x `local_ranks` ranks; every rank's rail carries `rate_mbit` Mbit/s in each direction."""

    nodes: int = 2
    local_ranks: int = 4
    rate_mbit: int = 200

    def __post_init__(self) -> None:
        if not (1 <= self.nodes <= 200 and 1 <= self.local_ranks <= 200 and self.rate_mbit >= 1):
            raise ValueError(
                f"rig: got {self.nodes} nodes x {self.local_ranks} ranks at {self.rate_mbit} Mbit/s; "
                "expected 1 to 200 nodes and ranks per node, and at least 1 Mbit/s"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.local_ranks

    def address(self, rank: int) -> str:
        """The rank's address; node-mates share the first three numbers."""
        return f"10.87.{rank // self.local_ranks}.{rank % self.local_ranks + 1}"

    def commands(self) -> Iterator[Command]:
        """All commands that build the rig, in order."""
        yield ("ip", "netns", "add", SWITCH)
        for bridge in (RAIL_BRIDGE, *(f"node{node}" for node in range(self.nodes))):
            kind = ("type", "bridge", "stp_state", "0", "forward_delay", "0")
            yield _ip(SWITCH, "link", "add", bridge, *kind)
            yield _ip(SWITCH, "link", "set", bridge, "up")
        for rank in range(self.ranks):
            yield from self._rank_commands(rank)

    def _rank_commands(self, rank: int) -> Iterator[Command]:
        name, node = namespace(rank), rank // self.local_ranks
        node_port, rail_port = f"n{rank}", f"r{rank}"
        yield ("ip", "netns", "add", name)
        yield _ip(name, "link", "set", "lo", "up")
        for interface, port, bridge in (
            (NODE_INTERFACE, node_port, f"node{node}"),
            (RAIL_INTERFACE, rail_port, RAIL_BRIDGE),
        ):
            yield ("ip", "link", "add", interface, "netns", name, "type", "veth", "peer", "name", port, "netns", SWITCH)
            yield _ip(SWITCH, "link", "set", port, "master", bridge)
            yield _ip(SWITCH, "link", "set", port, "up")
        yield _ip(name, "address", "add", f"{self.address(rank)}/24", "dev", NODE_INTERFACE)
        yield _ip(name, "link", "set", NODE_INTERFACE, "up")
        yield _ip(name, "link", "set", RAIL_INTERFACE, "up")
        for other in range(self.nodes):
            if other != node:
                route = (f"10.87.{other}.0/24", "dev", RAIL_INTERFACE, "src", self.address(rank))
                yield _ip(name, "route", "add", *route)
        yield self._shape(name, RAIL_INTERFACE)  # what the rank sends
        yield self._shape(SWITCH, rail_port)  # what it receives

    def _shape(self, name: str, interface: str) -> Command:
        bucket = ("tbf", "rate", f"{self.rate_mbit}mbit", "burst", "256kb", "latency", "50ms")
        return ("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *bucket)


def namespace(rank: int | str) -> str:
    """The network namespace of a rank."""
    return f"{PREFIX}{rank}"


def _ip(name: str, *words: str) -> Command:
    return ("ip", "-n", name, *words)
